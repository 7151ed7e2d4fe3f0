// The console in headless Chromium: `node browser.mjs URL TOKEN SERVICE PICTURES`, in the folder with the packages.
// SERVICE is a key `namespace/name`. It prints "watching" when the overview is open, and then waits for the text
// "scaled 1 -> 2" on its line. PICTURES is the folder for pictures of both pages.
import assert from "node:assert/strict";
import { Visit } from "../../e2e/browser/visit.mjs";
import { tryService } from "./try.mjs";

const [url, token, service, pictures] = process.argv.slice(2);
const visit = await Visit.begin(url, pictures);
const { page } = visit;

await visit.open("/");
await visit.checkNames("sign-in");
await visit.look("sign-in");
await visit.signIn(token);
assert.equal(await page.evaluate(() => document.cookie), "", "the cookie is not for scripts");
await page.waitForFunction((key) => document.querySelector("#lines").textContent.includes(key.split("/")[1]), {}, service);

console.log("watching");
await page.waitForFunction(() => document.querySelector("#lines").textContent.includes("scaled 1 -> 2"));
assert.equal(await page.$$eval("main img, main script", (found) => found.length), 0, "texts of tenants are text");
assert.ok((await visit.text("#lines")).includes("<script>"));
await visit.checkNames("the overview");
await visit.look("overview");

await page.setViewport({ width: 1440, height: 900 });
const link = `a[href="/services/${service}"]`;
for (let presses = 0; !(await page.evaluate((link) => document.activeElement.matches(link), link)); presses++) {
  assert.ok(presses < 30, "the service can be reached with Tab");
  await page.keyboard.press("Tab");
}
await visit.follow();
assert.equal(await visit.text("h1"), service);
await page.waitForSelector(".steps svg rect");
assert.equal(await page.$$eval("main img, main script", (found) => found.length), 0, "texts of tenants are text");
await visit.checkNames("the service's page");
await visit.look("service");
await tryService(visit, service);

await visit.open(`/services/${service}`);
await page.waitForSelector("#past input[type=range]");
await page.waitForFunction(() => {
  const { min, max } = document.querySelector("#point");
  return Number(max) > Number(min);
});
const readTime = async () => (await visit.text("#past-at")).split(":").slice(0, 3).join(":");
const newest = await readTime();
await page.focus("#point");
await page.keyboard.press("Home");
await page.waitForFunction((newest) => !document.querySelector("#past-at").textContent.startsWith(newest), {}, newest);
assert.equal(await page.evaluate(() => document.activeElement.id), "point", "the slider keeps the focus");
assert.ok((await readTime()) < newest);

await visit.open("/");
await visit.follow('a[href="/usage"]');
assert.equal(await visit.text("h1"), "Who used what");
await visit.checkNames("the usage");
await visit.look("usage");
await visit.open("/");
await page.type("#id", "no-such-request");
await visit.follow();
assert.ok((await visit.text("main")).includes("no-such-request"));
await visit.look("request");

await visit.follow(".session button");
assert.equal(visit.path(), "/sign-in");
await visit.open("/");
assert.equal(visit.path(), "/sign-in");
await visit.end("404"); // a request without a receipt
