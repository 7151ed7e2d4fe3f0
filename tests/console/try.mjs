// The page for trying a service in the browser of browser.mjs, which calls it on the page of a service that generates.
import assert from "node:assert/strict";

export async function tryService(visit, service) {
  const { page } = visit;
  await page.setViewport({ width: 1440, height: 900 });
  await visit.follow(`a[href="/services/${service}/try"]`);
  await visit.checkNames("the page for trying");
  await page.$eval("#message", (area) => (area.value = "<script>alert(1)</script>"));
  await page.$eval("#max_tokens", (field) => (field.value = "100000"));
  await page.focus("#temperature");
  for (let presses = 0; !(await page.evaluate(() => document.activeElement.textContent === "Send")); presses++) {
    assert.ok(presses < 9, "the button can be reached with Tab");
    await page.keyboard.press("Tab");
  }
  await page.keyboard.press("Enter");
  await page.waitForSelector("#state.problem");
  assert.match(await visit.text("#state"), /Status 400/, "the message of the API's error is shown");

  await visit.watchAnswer(7000, 3);
  await page.click(".stop");
  await page.waitForFunction(() => document.querySelector("#state").textContent.includes("You stopped"));
  assert.equal(await page.$eval(".stop", (button) => getComputedStyle(button).display), "none");

  await page.$eval("#max_tokens", (field) => (field.value = "60"));
  for (const turns of [1, 2]) {
    await page.click("#try button");
    await page.waitForFunction((turns) => document.querySelectorAll("#turns input").length === 2 * turns, {}, turns);
  }
  assert.match(await visit.text("#receipt"), /answered [0-9a-f]{32} with 200/);
  assert.ok((await visit.text("#curl")).includes('"role": "assistant"'), "the command has the earlier messages");
  assert.equal(await page.$$eval("main img, main script", (found) => found.length), 0, "texts are text");
  await visit.checkNames("the page for trying, with an answer");
  await visit.look("try");
}
