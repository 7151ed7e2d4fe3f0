// What a person does in the console at night: `node night.mjs URL TOKEN NAMESPACE PICTURES`, in the folder with the packages.
// The namespace has the services of e2e/test_console.py. It prints a line for each question: the seconds to its answer.
import assert from "node:assert/strict";
import { Visit } from "./visit.mjs";

const [url, token, namespace, pictures] = process.argv.slice(2);
const visit = await Visit.begin(url, pictures);
const { page } = visit;

async function time(question, find) {
  const began = performance.now();
  await find();
  console.log(`${question}: ${((performance.now() - began) / 1000).toFixed(1)} s`);
}

const linkTo = (name) => `a[href="/services/${namespace}/${name}"]`;
const waitForText = (selector, text) =>
  page.waitForFunction((selector, text) => document.querySelector(selector)?.textContent.includes(text), {}, selector, text);

await page.setViewport({ width: 1440, height: 900 });
await visit.open("/");
await visit.signIn(token);

await time("which service is not well, and why", async () => {
  await page.waitForSelector(linkTo("lost"));
  const words = await page.$$eval("#lines tr", (lines) => lines.map((line) => line.querySelector(".state").textContent));
  assert.match(words[0], /^Not ready.*(ModelNotFound|Unschedulable): /, "the first line is a fault, and has its reason");
  assert.equal(words.filter((each) => each.startsWith("Not ready")).length, 2);
  await visit.follow(linkTo("lost"));
  assert.match(await visit.text("#detail [role=status]"), /^Not ready ModelNotFound: .*nowhere/);
  assert.match(await visit.text("section[aria-labelledby=events]"), /ModelNotFound/);
});
await visit.open("/");
await visit.look("night-overview");

await page.setViewport({ width: 1440, height: 900 });
await time("why was a request slow", async () => {
  await visit.follow(linkTo("busy"));
  const slowest = await visit.text(".receipts li");
  assert.match(slowest, /with 200 in [\d.]+ m?s: [\d.]+ m?s in the gateway's queue/);
  await visit.open("/");
  await page.type("#id", slowest.match(/ answered (\S+) with/)[1]);
  await visit.follow();
  assert.ok((await visit.text("main")).includes(slowest), "the page of the request has the same words");
});

await visit.open(`/services/${namespace}/busy`);
await page.waitForSelector(".steps svg rect");
await waitForText("section[aria-labelledby=classes]", `${namespace}/heavy`);
const drawn = await page.$$eval("#course + .charts polyline", (lines) => lines.filter((line) => line.getAttribute("points")).length);
assert.ok(drawn >= 3, `the last minutes have ${drawn} lines`);
await page.waitForSelector("#past svg polyline");
await visit.checkNames("the page of a busy service");
await visit.look("night-service");

await page.setViewport({ width: 1440, height: 900 });
await visit.open("/");
await time("who used what", async () => {
  await visit.follow('a[href="/usage"]');
  const callers = await page.$$eval("main tbody th", (found) => found.map((each) => each.textContent));
  assert.equal(callers[0], `${namespace}/heavy`, "the caller with most tokens is first");
});

await visit.open(`/services/${namespace}/well`);
await visit.follow(`a[href="/services/${namespace}/well/try"]`);
await page.$eval("#message", (area) => (area.value = ""));
await page.type("#message", "How do I use the with statement?");
await page.type("#temperature", "0");
await visit.watchAnswer(400, 1);
await page.waitForFunction(() => document.querySelectorAll("#turns input").length === 2);
assert.match(await visit.text("#receipt"), new RegExp(`${namespace}/well answered [0-9a-f]{32} with 200`));
assert.ok((await visit.text("#curl")).includes(`/${namespace}/well/v1/chat/completions `), "the command has the service's URL");
await visit.look("night-try");
await visit.end();
