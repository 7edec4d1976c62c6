"""Values that a client may put where a message has texts, parts or calls."""

from hypothesis import strategies as st

NAMES = ("text", "function", "name", "id", "arguments")
MESSAGE_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(NAMES), inner),
)
