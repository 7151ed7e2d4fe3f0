// A proxy that answers its first request itself with 503, and passes the others on.
import assert from "node:assert/strict";
import http from "node:http";

// Calls `check` with a URL in place of `url`. Fails unless the client has sent a second request.
export async function overloadedAtFirst(url, check) {
  const { origin, pathname } = new URL(url);
  let number = 0;
  const proxy = http.createServer((request, response) => {
    if (number++ === 0) return response.writeHead(503).end('{"type":"error","error":{"type":"overloaded_error","message":"x"}}');
    request.pipe(http.request(origin + request.url, { method: request.method, headers: request.headers }, (answer) => {
      response.writeHead(answer.statusCode, answer.headers);
      answer.pipe(response);
    }));
  });
  await new Promise((done) => proxy.listen(0, "127.0.0.1", done));
  try {
    await check(`http://127.0.0.1:${proxy.address().port}${pathname}`);
  } finally {
    proxy.close();
    proxy.closeAllConnections();
  }
  assert.equal(number, 2);
}
