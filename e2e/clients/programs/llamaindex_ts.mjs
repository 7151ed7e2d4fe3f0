// LlamaIndex.TS: node llamaindex_ts.mjs URL MODEL
// The model of e2e/demo_model/script.py calls get_weather once, and answers with JSON behind it.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { overloadedAtFirst } from "./overloaded.mjs";

const [url, name] = process.argv.slice(2);
const require = createRequire(`${process.cwd()}/`);
const { OpenAI } = require("@llamaindex/openai");
const { tool } = require("llamaindex");
const { z } = require("zod");
const build = (model, baseURL = url, maxRetries = 0) => new OpenAI({ model, apiKey: "none", baseURL, maxTokens: 200, maxRetries });
const llm = build(name);
const messages = [{ role: "user", content: "How is the weather in Paris?" }];
const weather = tool({ name: "get_weather", description: "The weather.", parameters: z.object({ city: z.string() }), execute: () => "21" });

async function loop(ask) {
  const { message } = await ask(messages);
  const [call] = message.options.toolCall;
  assert.equal(call.name, "get_weather");
  const result = { role: "user", content: "21", options: { toolResult: { id: call.id, result: "21", isError: false } } };
  const { message: last } = await ask([...messages, message, result]);
  assert.deepEqual(JSON.parse(last.content), { city: "Paris", degrees: 21 });
}

const checks = {
  async text() {
    assert.equal((await llm.chat({ messages })).message.content, "Yes.");
  },
  async stream() {
    let text = "";
    for await (const chunk of await llm.chat({ messages, stream: true })) text += chunk.delta;
    assert.equal(text, "Yes.");
  },
  tool_loop: () => loop((all) => llm.chat({ messages: all, tools: [weather] })),
  async abort() {
    for await (const _ of await llm.chat({ messages, stream: true })) break;
    assert.equal((await llm.chat({ messages })).message.content, "Yes.");
  },
  async retry() {
    await overloadedAtFirst(url, async (proxied) => {
      assert.equal((await build(name, proxied, 1).chat({ messages })).message.content, "Yes.");
    });
  },
  async errors() {
    await assert.rejects(build("no-such-model").chat({ messages }), (error) => error.status === 404);
  },
};
for (const [label, check] of Object.entries(checks)) {
  await check();
  console.log(`passed: ${label}`);
}
