"""Tools as TypeScript; ``tests/conformance/vllm/test_kimi.py`` compares drawn ones with the published code."""

from typing import Any

import pytest

from mmrouter_lib.prompt import PromptTooLongError
from mmrouter_lib.prompt.typescript_tools import sort_deeply, write_tools


def written(parameters: Any, **function: Any) -> str | None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, **function}}
    text = write_tools(sort_deeply([tool]))
    if text is None:
        return None
    begin, end = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert text.startswith(begin)
    assert text.endswith(end)
    return text.removeprefix(begin).removesuffix(end)


def test_required_fields_stand_before_others_and_each_group_by_name():
    text = written(
        {
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9, "description": "How many\n\nat most 9"},
                "place": {"type": "string", "description": "Where"},
                "at": {"type": ["string", "null"]},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
        description="The weather\nof a place",
    )
    assert (
        text
        == """// The weather
// of a place
type f = (_: {
  // How many

  // at most 9
  // maximum: 9, minimum: 1
  days: number,
  // Where
  place: string,
  at?: string | null,
  // Default: "c"
  unit?: "c" | "f",
  [k: string]: never
}) => any;"""
    )


def test_described_items_of_an_array_stand_on_lines_of_their_own():
    lines = {"type": "array", "items": {"type": "number"}, "maxItems": 3, "minItems": 1}
    points = {"type": "array", "items": {"type": "object", "description": "A point", "properties": {"x": True}}}
    assert (
        written({"properties": {"lines": lines, "points": points, "any": {"type": "array"}}})
        == """type f = (_: {
  any?: Array<any>,
  // maxItems: 3, minItems: 1
  lines?: Array<number>,
  points?: Array<
    // A point
    {
      x?: any
    }
  >
}) => any;"""
    )


def test_definitions_are_interfaces_and_parameters_that_refer_to_themselves_are_one():
    node = {"type": "object", "description": "A node", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    assert (
        written({"$defs": {"Node": node}, "properties": {"first": {"$ref": "#/$defs/Node"}}})
        == """// A node
interface Node {
  next?: Node
}
type f = (_: {
  first?: Node
}) => any;"""
    )
    assert (
        written({"properties": {"or": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}})
        == """interface parameters {
  or?: parameters | null
}
type f = (_: parameters) => any;"""
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/missing"},
        {"$ref": "#/definitions/A"},
        {"type": "string", "enum": [1]},
        {"type": ["string", "number"], "enum": ["a"]},
        {"type": ["file"]},
        {"description": "no type"},
        {"type": "object", "additionalProperties": 1},
        None,
    ],
)
def test_a_schema_on_which_the_published_code_fails_has_no_text(schema):
    assert written({"properties": {"a": schema}}) is None


def test_a_tool_without_a_function_is_left_out():
    assert write_tools([{"type": "plugin"}, {"type": "function", "function": {}}]) == ""
    assert written({}) == written(None) == "type f = (_: {}) => any;"


def test_a_text_that_grows_with_every_level_around_it_is_refused():
    schema: dict[str, Any] = {"type": "string", "description": "a\n" * 9_000}
    for _ in range(90):
        schema = {"type": "array", "items": schema, "description": "b"}
    with pytest.raises(PromptTooLongError):
        written({"properties": {"a": schema}})
