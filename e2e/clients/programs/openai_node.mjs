// openai for Node.
import assert from "node:assert/strict";
import { NotFoundError, build, client, model, run, url } from "./checks.mjs";
import { overloadedAtFirst } from "./overloaded.mjs";

const messages = [{ role: "user", content: "How do I use the with statement?" }];
const schema = { type: "object", properties: { n: { type: "integer", minimum: 0, maximum: 99 } }, required: ["n"], additionalProperties: false };

await run({
  async models() {
    const ids = [];
    for await (const found of client.models.list()) ids.push(found.id);
    assert.deepEqual(ids, [model]);
  },
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, max_completion_tokens: 20 });
    assert.ok(answer.choices[0].message.content);
  },
  async stream() {
    const body = { model, messages, max_tokens: 30, temperature: 0 };
    const whole = await client.chat.completions.create(body);
    const stream = await client.chat.completions.create({ ...body, stream: true, stream_options: { include_usage: true } });
    let text = "", usage;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.total_tokens, whole.usage.total_tokens);
  },
  async stream_helper() {
    const stream = client.chat.completions.stream({ model, messages, max_tokens: 10 });
    assert.ok(await stream.finalContent());
  },
  async completions() {
    const answer = await client.completions.create({ model, prompt: "with open(", max_tokens: 8 });
    assert.equal(answer.object, "text_completion");
  },
  async tool() {
    const tools = [{ type: "function", function: { name: "count", parameters: schema } }];
    const fields = { model, tools, max_tokens: 200 };
    const answer = await client.chat.completions.create({ ...fields, messages, tool_choice: "required", parallel_tool_calls: false });
    const { message } = answer.choices[0];
    const [call] = message.tool_calls;
    assert.equal(typeof JSON.parse(call.function.arguments).n, "number");
    const result = { role: "tool", tool_call_id: call.id, content: "9" };
    const last = await client.chat.completions.create({ ...fields, messages: [...messages, message, result], tool_choice: "none" });
    assert.equal(last.choices.length, 1);
  },
  async schema() {
    const response_format = { type: "json_schema", json_schema: { name: "count", schema, strict: true } };
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 200, response_format });
    assert.equal(typeof JSON.parse(answer.choices[0].message.content).n, "number");
  },
  async abort() {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 400, stream: true });
    for await (const _ of stream) break;
    stream.controller.abort();
    assert.ok((await client.chat.completions.create({ model, messages, max_tokens: 5 })).choices);
  },
  async retry() {
    await overloadedAtFirst(url, async (proxied) => {
      assert.ok((await build(proxied, 1).chat.completions.create({ model, messages, max_tokens: 5 })).choices);
    });
  },
  async errors() {
    const call = client.chat.completions.create({ model: "no-such", messages });
    await assert.rejects(call, (error) => error instanceof NotFoundError && error.param === "model");
  },
});
