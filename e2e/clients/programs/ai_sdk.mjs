// Vercel's AI SDK with each provider for this server: node ai_sdk.mjs PROVIDER URL MODEL
// The model of e2e/demo_model/script.py calls get_weather once, and answers with JSON behind it.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { overloadedAtFirst } from "./overloaded.mjs";

const [provider, url, name] = process.argv.slice(2);
const require = createRequire(`${process.cwd()}/`);
const { APICallError, Output, generateText, stepCountIs, streamText, tool } = require("ai");
const { z } = require("zod");
const makers = {
  chat: (options) => require("@ai-sdk/openai").createOpenAI(options).chat,
  responses: (options) => require("@ai-sdk/openai").createOpenAI(options),
  anthropic: (options) => require("@ai-sdk/anthropic").createAnthropic(options),
  compatible: (options) => require("@ai-sdk/openai-compatible").createOpenAICompatible(
    { ...options, name: "conveyor", supportsStructuredOutputs: true, includeUsage: true }),
};
const build = (id, baseURL = url) => makers[provider]({ baseURL, apiKey: "none" })(id);

const cities = [];
const tools = {
  get_weather: tool({
    description: "The weather.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => { cities.push(city); return { degrees: 21 }; },
  }),
};
const schema = z.object({ city: z.string(), degrees: z.number() });
const forecast = { city: "Paris", degrees: 21 };
const messages = [{ role: "user", content: "How is the weather in Paris?" }];
const common = {
  model: build(name), messages, maxOutputTokens: 200, maxRetries: 0,
  ...(provider === "responses" ? { providerOptions: { openai: { store: false } } } : {}),
};

async function run(checks) {
  for (const [label, check] of Object.entries(checks)) {
    cities.length = 0;
    await check();
    console.log(`passed: ${label}`);
  }
}

// For models that it does not know, the Anthropic provider asks for a call of a tool of its own in place of a schema.
const withSchema = provider === "anthropic" ? {} : {
  async tools_and_a_schema() {
    const { output } = await generateText({ ...common, tools, output: Output.object({ schema }), stopWhen: stepCountIs(3) });
    assert.deepEqual(output, forecast);
    assert.deepEqual(cities, ["Paris"]);
  },
};

await run({
  async text() {
    const { text, usage } = await generateText(common);
    assert.equal(text, "Yes.");
    assert.ok(usage.totalTokens > 0);
  },
  async tool_loop() {
    const { text, steps } = await generateText({ ...common, tools, stopWhen: stepCountIs(3) });
    assert.deepEqual(JSON.parse(text), forecast);
    assert.deepEqual([cities, steps.length], [["Paris"], 2]);
  },
  async streamed_tool_loop() {
    const answer = streamText({ ...common, tools, stopWhen: stepCountIs(3) });
    let text = "";
    for await (const part of answer.fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "text-delta") text += part.text;
    }
    assert.deepEqual(cities, ["Paris"]);
    assert.ok(text.endsWith(JSON.stringify(forecast).replaceAll(":", ": ").replaceAll(",", ", ")), text);
    assert.ok((await answer.totalUsage).totalTokens > 0);
  },
  ...withSchema,
  async next_turn() {
    const first = await generateText({ ...common, tools, stopWhen: stepCountIs(3) });
    const longer = [...messages, ...first.response.messages, { role: "user", content: "And now?" }];
    const { text } = await generateText({ ...common, messages: longer, tools, stopWhen: stepCountIs(3) });
    assert.deepEqual(JSON.parse(text), forecast);
  },
  async abort() {
    const stopped = new AbortController();
    const answer = streamText({ ...common, abortSignal: stopped.signal });
    for await (const part of answer.fullStream) if (part.type === "text-delta") stopped.abort();
    assert.equal((await generateText(common)).text, "Yes.");
  },
  async retry() {
    await overloadedAtFirst(url, async (proxied) => {
      assert.equal((await generateText({ ...common, model: build(name, proxied), maxRetries: 1 })).text, "Yes.");
    });
  },
  async errors() {
    const wrong = generateText({ ...common, model: build("no-such-model") });
    await assert.rejects(wrong, (error) => APICallError.isInstance(error) && error.statusCode === 404);
  },
});
