// Anthropic's client for Node: node anthropic_node.mjs URL MODEL
// The model of e2e/demo_model/script.py calls get_weather once, and answers with JSON behind it.
import assert from "node:assert/strict";
import http from "node:http";
import { createRequire } from "node:module";

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

// Answers the first request itself with 529, and passes the others on.
async function behindAnOverloadedProxy(check) {
  let number = 0;
  const proxy = http.createServer((request, response) => {
    if (number++ === 0) return response.writeHead(529).end('{"type":"error","error":{"type":"overloaded_error","message":"x"}}');
    request.pipe(http.request(baseURL + request.url, { method: request.method, headers: request.headers }, (answer) => {
      response.writeHead(answer.statusCode, answer.headers);
      answer.pipe(response);
    }));
  });
  await new Promise((done) => proxy.listen(0, "127.0.0.1", done));
  await check(`http://127.0.0.1:${proxy.address().port}`);
  proxy.close();
  proxy.closeAllConnections();
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
    await behindAnOverloadedProxy(async (proxied) => {
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
