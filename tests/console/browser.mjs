// The console in headless Chromium: `node browser.mjs URL TOKEN SERVICE PICTURES`, in the folder with the packages.
// SERVICE is a key `namespace/name`. It prints "watching" when the overview is open, and then waits for the text
// "scaled 1 -> 2" on its line. PICTURES is the folder for pictures of both pages.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { tryService } from "./try.mjs";

const [url, token, service, pictures] = process.argv.slice(2);
const packages = createRequire(`${process.cwd()}/`);
const puppeteer = packages("puppeteer-core");
const { default: chromium } = await import(packages.resolve("@sparticuz/chromium"));
const browser = await puppeteer.launch({
  args: chromium.args.filter((flag) => !flag.includes("web-security")),
  executablePath: await chromium.executablePath(),
  headless: "shell",
});
const page = await browser.newPage();
const failures = [];
page.on("pageerror", (error) => failures.push(error.message));
page.on("console", (message) => message.type() === "error" && failures.push(message.text()));
page.on("request", (request) => {
  if (!request.url().startsWith(`${url}/`) && !request.url().startsWith("data:")) failures.push(`loads ${request.url()}`);
  setTimeout(() => request.continue(), request.url().endsWith("/hx-sse.min.js") ? 500 : 0); // a slow network
});
await page.setRequestInterception(true);

async function look(name) {
  for (const scheme of ["light", "dark"]) {
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
    for (const width of [390, 1440]) {
      await page.setViewport({ width, height: width < 1000 ? 844 : 900 });
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
      assert.ok(wide <= 0, `${name} at ${width} is ${wide} pixels too wide`);
      await page.screenshot({ path: `${pictures}/${name}-${scheme}-${width}.png`, fullPage: true });
    }
  }
}

async function checkNames(name) {
  const unnamed = await page.$$eval("input:not([type=hidden]), textarea, select, button, a, svg, table th", (elements) =>
    elements.filter((each) => !each.labels?.length && !each.ariaLabel && !each.textContent.trim()).map((each) => each.outerHTML),
  );
  assert.deepEqual(unnamed, [], `elements of ${name} without a name for screen readers`);
}

await page.goto(`${url}/`);
assert.equal(new URL(page.url()).pathname, "/sign-in");
await checkNames("sign-in");
await look("sign-in");
await page.type("#token", token);
await Promise.all([page.waitForNavigation(), page.keyboard.press("Enter")]);
assert.equal(new URL(page.url()).pathname, "/");
assert.equal(await page.evaluate(() => document.cookie), "", "the cookie is not for scripts");
await page.waitForFunction((key) => document.querySelector("#lines").textContent.includes(key.split("/")[1]), {}, service);

console.log("watching");
await page.waitForFunction(() => document.querySelector("#lines").textContent.includes("scaled 1 -> 2"));
assert.equal(await page.$$eval("main img, main script", (found) => found.length), 0, "texts of tenants are text");
assert.ok((await page.$eval("#lines", (lines) => lines.textContent)).includes("<script>"));
await checkNames("the overview");
await look("overview");

await page.setViewport({ width: 1440, height: 900 });
const link = `a[href="/services/${service}"]`;
for (let presses = 0; !(await page.evaluate((link) => document.activeElement.matches(link), link)); presses++) {
  assert.ok(presses < 30, "the service can be reached with Tab");
  await page.keyboard.press("Tab");
}
await Promise.all([page.waitForNavigation(), page.keyboard.press("Enter")]);
assert.equal(await page.$eval("h1", (title) => title.textContent), service);
await page.waitForSelector(".steps svg rect");
assert.equal(await page.$$eval("main img, main script", (found) => found.length), 0, "texts of tenants are text");
await checkNames("the service's page");
await look("service");
await tryService(page, service, checkNames, look);

await page.goto(`${url}/services/${service}`);
await page.waitForSelector("#past input[type=range]");
await page.waitForFunction(() => {
  const { min, max } = document.querySelector("#point");
  return Number(max) > Number(min);
});
const readTime = () => page.$eval("#past-at", (found) => found.textContent.split(":").slice(0, 3).join(":"));
const newest = await readTime();
await page.focus("#point");
await page.keyboard.press("Home");
await page.waitForFunction((newest) => !document.querySelector("#past-at").textContent.startsWith(newest), {}, newest);
assert.equal(await page.evaluate(() => document.activeElement.id), "point", "the slider keeps the focus");
assert.ok((await readTime()) < newest);

await page.goto(`${url}/`);
await Promise.all([page.waitForNavigation(), page.click('a[href="/usage"]')]);
assert.equal(await page.$eval("h1", (title) => title.textContent), "Who used what");
await checkNames("the usage");
await look("usage");
await page.goto(`${url}/`);
await page.type("#id", "no-such-request");
await Promise.all([page.waitForNavigation(), page.keyboard.press("Enter")]);
assert.ok((await page.$eval("main", (main) => main.textContent)).includes("no-such-request"));
await look("request");

await Promise.all([page.waitForNavigation(), page.click(".session button")]);
assert.equal(new URL(page.url()).pathname, "/sign-in");
await page.goto(`${url}/`);
assert.equal(new URL(page.url()).pathname, "/sign-in");
assert.deepEqual(failures.filter((each) => !each.includes("404")), [], "a request without a receipt is 404");
await browser.close();
