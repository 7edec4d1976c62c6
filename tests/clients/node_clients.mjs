// Clients of the matrix that are Node packages; as python_clients.py. Run with hack/clients' node_modules beside it.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const { MMROUTER_URL: URL_, MMROUTER_KEY: KEY, MMROUTER_MODEL: MODEL } = process.env;
const BASE = `${URL_}/v1`;
const PNG = readFileSync(process.env.MMROUTER_IMAGE);
const DATA_URI = `data:image/png;base64,${PNG.toString("base64")}`;
const [TEXT, ABOUT_IMAGE, STORY, SHORT, LONG, RETRIES] = ["Say hello.", "What is this?", "Tell a story of the sea.", 8, 400, 20];
const SCHEMA = {
  title: "paint",
  type: "object",
  properties: { color: { type: "string", enum: ["red", "green"] } },
  required: ["color"],
  additionalProperties: false,
};

// Packages are resolved from the environment's folder, which is not where this file is.
const resolve = createRequire(`${process.env.MMROUTER_NODE}/package.json`).resolve;
const load = (name) => import(pathToFileURL(resolve(name)));

const said = (text) => [{ role: "user", content: text }];

async function openai() {
  const { default: OpenAI } = await load("openai");
  const client = new OpenAI({ baseURL: BASE, apiKey: KEY, maxRetries: RETRIES });
  const ask = (messages, fields) =>
    client.chat.completions.create({ model: MODEL, messages, max_tokens: SHORT, temperature: 0, ...fields });
  const pictured = [
    { role: "user", content: [{ type: "text", text: ABOUT_IMAGE }, { type: "image_url", image_url: { url: DATA_URI } }] },
  ];
  const tool = { type: "function", function: { name: "paint", description: "Paint it.", parameters: SCHEMA } };
  return {
    chat: async () => {
      const answer = await ask(said(TEXT));
      return [answer.choices[0].message.content, answer.usage.total_tokens];
    },
    stream: async () => {
      let [text, total] = ["", 0];
      for await (const chunk of await ask(said(TEXT), { stream: true, stream_options: { include_usage: true } })) {
        text += chunk.choices[0]?.delta?.content ?? "";
        total = chunk.usage?.total_tokens ?? total;
      }
      return [text, total];
    },
    image: async () => (await ask(pictured)).choices[0].message.content,
    tools: async () => {
      const choice = { type: "function", function: { name: "paint" } };
      const answer = await ask(said(TEXT), { tools: [tool], tool_choice: choice, max_tokens: LONG });
      const called = answer.choices[0].message.tool_calls[0].function;
      return [called.name, JSON.parse(called.arguments)];
    },
    structured: async () => {
      const format = { type: "json_schema", json_schema: { name: "paint", schema: SCHEMA, strict: true } };
      return JSON.parse((await ask(said(TEXT), { response_format: format, max_tokens: LONG })).choices[0].message.content);
    },
    responses: async () =>
      (await client.responses.create({ model: MODEL, input: TEXT, max_output_tokens: SHORT, temperature: 0 })).output_text,
    cancel: async () => {
      for await (const chunk of await ask(said(STORY), { stream: true, max_tokens: LONG })) return chunk.choices.length > 0;
    },
  };
}

async function anthropic() {
  const { default: Anthropic } = await load("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: URL_, apiKey: KEY, maxRetries: RETRIES });
  const fields = (content, more) => ({ model: MODEL, messages: said(content), max_tokens: SHORT, temperature: 0, ...more });
  const total = (usage) => usage.input_tokens +
    (usage.cache_read_input_tokens ?? 0) + (usage.cache_creation_input_tokens ?? 0) + usage.output_tokens;
  return {
    chat: async () => {
      const answer = await client.messages.create(fields(TEXT));
      return [answer.content[0].text, total(answer.usage)];
    },
    stream: async () => {
      const answer = await client.messages.stream(fields(TEXT)).finalMessage();
      return [answer.content[0].text, total(answer.usage)];
    },
    image: async () => {
      const source = { type: "base64", media_type: "image/png", data: PNG.toString("base64") };
      const answer = await client.messages.create(fields([{ type: "text", text: ABOUT_IMAGE }, { type: "image", source }]));
      return answer.content[0].text;
    },
    tools: async () => {
      const tools = [{ name: "paint", description: "Paint it.", input_schema: SCHEMA }];
      const answer = await client.messages.create(
        fields(TEXT, { tools, tool_choice: { type: "tool", name: "paint" }, max_tokens: LONG }),
      );
      const use = answer.content.find((block) => block.type === "tool_use");
      return [use.name, use.input];
    },
    structured: async () => {
      const output_config = { format: { type: "json_schema", schema: SCHEMA } };
      return JSON.parse((await client.messages.create(fields(TEXT, { output_config, max_tokens: LONG }))).content[0].text);
    },
    cancel: async () => {
      for await (const event of await client.messages.create(fields(STORY, { stream: true, max_tokens: LONG }))) {
        return event.type === "message_start";
      }
    },
    count: async () => (await client.messages.countTokens({ model: MODEL, messages: said(TEXT) })).input_tokens,
  };
}

async function aiSdk() {
  const { generateText, generateObject, streamText, jsonSchema, tool } = await load("ai");
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const provider = createOpenAICompatible({ name: "mmrouter", baseURL: BASE, apiKey: KEY, supportsStructuredOutputs: true });
  const common = { model: provider(MODEL), temperature: 0, maxRetries: RETRIES };
  const short = { ...common, maxOutputTokens: SHORT };
  const longer = { ...common, maxOutputTokens: LONG };
  return {
    chat: async () => (await generateText({ ...short, prompt: TEXT })).text,
    stream: async () => {
      let text = "";
      for await (const part of streamText({ ...short, prompt: TEXT }).textStream) text += part;
      return text;
    },
    image: async () => {
      const content = [{ type: "text", text: ABOUT_IMAGE }, { type: "image", image: PNG, mediaType: "image/png" }];
      return (await generateText({ ...short, messages: [{ role: "user", content }] })).text;
    },
    tools: async () => {
      const tools = { paint: tool({ description: "Paint it.", inputSchema: jsonSchema(SCHEMA) }) };
      const toolChoice = { type: "tool", toolName: "paint" };
      const [call] = (await generateText({ ...longer, prompt: TEXT, tools, toolChoice })).toolCalls;
      return [call.toolName, call.input];
    },
    structured: async () => (await generateObject({ ...longer, prompt: TEXT, schema: jsonSchema(SCHEMA) })).object,
    cancel: async () => {
      const abort = new AbortController();
      const { textStream } = streamText({ ...common, maxOutputTokens: LONG, prompt: STORY, abortSignal: abort.signal });
      for await (const part of textStream) {
        abort.abort();
        return part.length >= 0;
      }
    },
  };
}

const clients = { "openai-node": openai, "anthropic-node": anthropic, "ai-sdk": aiSdk };
const client = await clients[process.argv[2]]();
for (const scenario of process.env.MMROUTER_SCENARIOS.split(" ").filter((name) => name in client)) {
  let result;
  try {
    result = { answer: await client[scenario]() };
  } catch (error) {
    result = { error: `${error.name}: ${error.message}` };
  }
  console.log(JSON.stringify({ scenario, ...result }));
}
