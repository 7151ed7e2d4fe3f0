// LangChain.js with each of its classes for this server: node langchain_js.mjs KIND URL MODEL
// The model of e2e/demo_model/script.py calls get_weather once, and answers with JSON behind it.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { overloadedAtFirst } from "./overloaded.mjs";

const [kind, url, name] = process.argv.slice(2);
const require = createRequire(`${process.cwd()}/`);
const { HumanMessage } = require("@langchain/core/messages");
const { tool } = require("@langchain/core/tools");
const { z } = require("zod");

function build(model, base = url, maxRetries = 0) {
  if (kind === "anthropic") {
    const { ChatAnthropic } = require("@langchain/anthropic");
    return new ChatAnthropic({ model, apiKey: "none", anthropicApiUrl: base.replace(/\/v1$/, ""), maxTokens: 200, maxRetries });
  }
  const { ChatOpenAI } = require("@langchain/openai");
  const more = { configuration: { baseURL: base }, useResponsesApi: kind === "responses", maxTokens: 200, maxRetries };
  return new ChatOpenAI({ model, apiKey: "none", ...more });
}

const weather = tool(async () => JSON.stringify({ degrees: 21 }), {
  name: "get_weather", description: "The weather.", schema: z.object({ city: z.string() }),
});
const question = new HumanMessage("How is the weather in Paris?");
const forecast = { city: "Paris", degrees: 21 };
const model = build(name);

async function loop(ask) {
  const messages = [question];
  const first = await ask(messages);
  assert.deepEqual(first.tool_calls.map(({ name, args }) => [name, args]), [["get_weather", { city: "Paris" }]]);
  messages.push(first, await weather.invoke({ ...first.tool_calls[0], type: "tool_call" }));
  assert.deepEqual(JSON.parse((await ask(messages)).text), forecast);
}

async function collect(stream) {
  let whole;
  for await (const chunk of stream) whole = whole ? whole.concat(chunk) : chunk;
  return whole;
}

const checks = {
  async text() {
    const answer = await model.invoke([question]);
    assert.equal(answer.text, "Yes.");
    assert.ok(answer.usage_metadata.total_tokens > 0);
  },
  async stream_with_usage() {
    const answer = await collect(await model.stream([question]));
    assert.equal(answer.text, "Yes.");
    assert.ok(answer.usage_metadata.total_tokens > 0);
  },
  tool_loop: () => loop((messages) => model.bindTools([weather]).invoke(messages)),
  streamed_tool_loop: () => loop(async (messages) => collect(await model.bindTools([weather]).stream(messages))),
  async abort() {
    const stopped = new AbortController();
    stopped.abort();
    await assert.rejects(model.invoke([question], { signal: stopped.signal }));
    for await (const _ of await model.stream([question])) break;
    assert.equal((await model.invoke([question])).text, "Yes.");
  },
  async retry() {
    await overloadedAtFirst(url, async (proxied) => {
      assert.equal((await build(name, proxied, 1).invoke([question])).text, "Yes.");
    });
  },
  async errors() {
    await assert.rejects(build("no-such-model").invoke([question]), (error) => error.status === 404);
  },
};
for (const [label, check] of Object.entries(checks)) {
  await check();
  console.log(`passed: ${label}`);
}
