// Anthropic's client for Node: node anthropic_node.mjs URL MODEL
// The model of e2e/demo_model/script.py calls get_weather once, and answers with JSON behind it.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { overloadedAtFirst } from "./overloaded.mjs";

const [url, model] = process.argv.slice(2);
const require = createRequire(`${process.cwd()}/`);
const { Anthropic, NotFoundError } = require("@anthropic-ai/sdk");
const baseURL = url.replace(/\/v1$/, "");
const client = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0 });
const tools = [{ name: "get_weather", description: "The weather.", input_schema: { type: "object", properties: { city: { type: "string" } } } }];
const asked = { model, max_tokens: 200, messages: [{ role: "user", content: "How is the weather in Paris?" }] };

async function loop(ask) {
  const first = await ask({ ...asked, tools });
  const call = first.content.find((block) => block.type === "tool_use");
  assert.deepEqual([first.stop_reason, call.name, call.input], ["tool_use", "get_weather", { city: "Paris" }]);
  const result = { type: "tool_result", tool_use_id: call.id, content: '{"degrees": 21}' };
  const messages = [...asked.messages, { role: "assistant", content: first.content }, { role: "user", content: [result] }];
  const second = await ask({ ...asked, tools, messages });
  assert.deepEqual(JSON.parse(second.content[0].text), { city: "Paris", degrees: 21 });
}

const checks = {
  async text() {
    const answer = await client.messages.create(asked);
    assert.equal(answer.content[0].text, "Yes.");
    assert.ok(answer.usage.output_tokens > 0);
  },
  async stream_with_usage() {
    const answer = await client.messages.stream(asked).finalMessage();
    assert.equal(answer.content[0].text, "Yes.");
    assert.ok(answer.usage.output_tokens > 0);
  },
  tool_loop: () => loop((fields) => client.messages.create(fields)),
  streamed_tool_loop: () => loop((fields) => client.messages.stream(fields).finalMessage()),
  async count() {
    const { max_tokens, ...counted } = asked;
    assert.ok((await client.messages.countTokens(counted)).input_tokens > 0);
  },
  async abort() {
    const stream = await client.messages.create({ ...asked, stream: true });
    for await (const event of stream) if (event.type === "content_block_delta") break;
    stream.controller.abort();
    assert.equal((await client.messages.create(asked)).content[0].text, "Yes.");
  },
  async retry() {
    await overloadedAtFirst(baseURL, async (proxied) => {
      const retrying = new Anthropic({ baseURL: proxied, apiKey: "none", maxRetries: 1 });
      assert.equal((await retrying.messages.create(asked)).content[0].text, "Yes.");
    });
  },
  async errors() {
    await assert.rejects(client.messages.create({ ...asked, model: "no-such-model" }), NotFoundError);
  },
};
for (const [label, check] of Object.entries(checks)) {
  await check();
  console.log(`passed: ${label}`);
}
