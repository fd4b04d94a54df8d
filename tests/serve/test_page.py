"""The page in a real browser: Debian's chromium, driven by playwright. Left out where there is none."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.live import KEY, Live, served

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")]


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: "playwright.Browser", server: Live) -> Iterator["playwright.Page"]:
    """A page of a fresh browser, on which nothing may go wrong unseen."""
    context = browser.new_context()
    # Greedy answers of this model are letters, which are read as they were said.
    context.add_init_script("localStorage.setItem('gsa-settings', '{\"temperature\": 0}')")
    page, faults = context.new_page(), list[str]()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.goto(server.address)
    page.wait_for_selector("#model:not(:empty)")
    yield page
    wanted = ("404 (Not Found)", "429 (Too Many Requests)")  # of states that a test has removed, and a full server
    assert [fault for fault in faults if not any(text in fault for text in wanted)] == []
    context.close()


def say(page: "playwright.Page", text: str) -> None:
    messages = page.locator("#messages li")
    before = messages.count()
    page.fill("#message", text)
    page.press("#message", "Enter")
    playwright.expect(messages).to_have_count(before + 2)
    page.wait_for_selector("#send:visible")


class Held:
    """Holds requests back until they are let go."""

    def __init__(self, page: "playwright.Page", address: str) -> None:
        self.page, self.address, self.routes = page, address, list[playwright.Route]()
        page.route(address, lambda route: self.routes.append(route))

    def wait(self) -> None:
        """Returns when a request is held."""
        for _ in range(600):
            if self.routes:
                return
            self.page.wait_for_timeout(50)
        raise AssertionError("nothing was asked")

    def release(self) -> None:
        for route in self.routes:
            route.continue_()
        self.page.unroute(self.address)


def start(page: "playwright.Page", text: str) -> Held:
    """Sends a message, whose answer begins when it is let go."""
    held = Held(page, "**/v1/chat/completions")
    page.fill("#message", text)
    page.press("#message", "Enter")
    held.wait()
    return held


def load_again(page: "playwright.Page") -> None:
    page.reload()
    page.wait_for_selector("#model:not(:empty)")
    page.wait_for_selector("#message:focus, #messages li")  # what was kept is shown


def open_conversation(page: "playwright.Page", title: str) -> None:
    page.get_by_role("button", name=title, exact=True).click()
    playwright.expect(page.locator("#title")).to_have_text(title)


def titles(page: "playwright.Page") -> list[str]:
    return page.locator("#conversations li button:first-child").all_inner_texts()


def contents(page: "playwright.Page", role: str = "assistant") -> list[str]:
    return page.locator(f"#messages .{role} .content").all_inner_texts()


def stats(page: "playwright.Page") -> tuple[int, int]:
    """Tokens that were read for the last answer, and tokens that were cached."""
    text = page.locator(".stats").last.inner_text()
    assert "tokens/s" in text
    assert "state of 4.0 KB" in text
    read, cached = re.search(r"read (\d+) of \d+, (\d+) cached", text).groups()
    return int(read), int(cached)


def test_a_conversation_branches_and_going_back_costs_nothing(page: "playwright.Page") -> None:
    say(page, "Hello")
    first = contents(page)
    say(page, "And now?")
    assert len(contents(page)) == 2
    read, cached = stats(page)
    assert (read < 40, cached > 200) == (True, True)
    page.get_by_role("button", name="Write another answer").last.click()
    page.wait_for_selector("text=2 of 2")
    assert len(contents(page)) == 2
    page.get_by_role("button", name="Branch before").last.click()
    page.wait_for_selector("text=1 of 2")
    page.get_by_role("button", name="Edit this message in a new branch").last.click()
    page.get_by_role("textbox", name="Edited message").fill("And then?")
    page.keyboard.press("Enter")
    page.wait_for_selector("#messages .user:has-text('2 of 2')")
    page.wait_for_selector("#send:visible")
    assert contents(page, "user") == ["Hello", "And then?"]
    assert contents(page)[0] == first[0]
    assert stats(page)[1] >= cached


def test_an_answer_can_be_stopped_and_talked_on_from(page: "playwright.Page") -> None:
    page.fill("#message", "Hello")
    page.press("#message", "Enter")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    assert not page.is_visible("#error")
    say(page, "Go on")
    assert len(contents(page, "user")) == 2
    assert "" not in contents(page)


def test_an_answer_is_kept_while_another_conversation_is_looked_at(page: "playwright.Page") -> None:
    say(page, "First")
    page.click("#new")
    held = start(page, "Second")
    open_conversation(page, "First")
    assert page.get_by_role("button", name="Write another answer").is_disabled()
    held.release()
    page.wait_for_selector("#send:visible")
    assert contents(page, "user") == ["First"]
    assert page.get_by_role("button", name="Write another answer").is_enabled()
    assert page.get_by_role("button", name="Edit this message").is_enabled()
    page.click("#new")
    held = start(page, "Third")
    page.click("#new")
    held.release()
    page.wait_for_selector("#send:visible")
    load_again(page)
    assert sorted(titles(page)) == ["First", "Second", "Third"]
    for title in titles(page):
        open_conversation(page, title)
        assert contents(page, "user") == [title]
        assert len(contents(page)[0]) > 20


def test_a_conversation_that_is_removed_while_it_is_answered_stays_away(page: "playwright.Page") -> None:
    start(page, "Doomed")
    page.get_by_role("button", name="Remove Doomed").click()
    page.wait_for_selector("#send:visible")  # nobody waits for the answer any more
    assert titles(page) == []
    load_again(page)
    assert titles(page) == []


def test_two_tabs_go_on_from_one_message_in_two_branches(page: "playwright.Page") -> None:
    say(page, "Shared")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("#messages .stats")
    say(page, "From here")
    say(other, "From there")
    playwright.expect(other.locator("#messages .user").last).to_contain_text("2 of 2")  # it has come without a reload
    load_again(page)
    assert contents(page, "user") == ["Shared", "From there"]
    page.get_by_role("button", name="Branch before").click()
    page.wait_for_selector("text=1 of 2")
    assert contents(page, "user") == ["Shared", "From here"]
    assert len(contents(page)) == 2
    other.close()


def test_an_answer_that_fails_leaves_nothing(page: "playwright.Page") -> None:
    told = {"status": 429, "json": {"error": {"message": "the server is full", "code": "server_full"}}}
    bodies = list[dict[str, object]]()
    page.on("request", lambda request: bodies.append(request.post_data_json) if "completions" in request.url else None)

    def fail(button: str) -> None:
        page.route("**/v1/chat/completions", lambda route: route.fulfill(**told))
        page.get_by_role("button", name=button).last.click()
        playwright.expect(page.locator("#error")).to_have_text("the server is full")
        page.wait_for_selector("#send:visible")
        page.unroute("**/v1/chat/completions")

    page.fill("#message", "Full")
    fail("Send")
    assert (contents(page, "user"), contents(page)) == (["Full"], [])
    load_again(page)
    assert (contents(page, "user"), contents(page)) == (["Full"], [])
    page.get_by_role("button", name="Ask for an answer").click()
    page.wait_for_selector(".stats")
    assert bodies[-1]["messages"] == [{"role": "user", "content": "Full"}]
    assert page.get_by_role("button", name="Ask for an answer").count() == 0
    first = contents(page)
    fail("Write another answer")
    assert contents(page) == first  # it is chosen again, and has none beside it
    assert page.get_by_role("button", name="Branch before").count() == 0
    page.click("#new")
    page.fill("#message", "Full")
    fail("Send")
    say(page, "Again")
    assert bodies[-1]["messages"] == [{"role": "user", "content": "Full"}, {"role": "user", "content": "Again"}]


def test_conversations_survive_a_reload_and_a_server_that_forgets(page: "playwright.Page", server: Live) -> None:
    say(page, "Remember me")
    before = contents(page)
    page.reload()
    page.wait_for_selector(".stats")
    assert contents(page) == before
    for entry in server.serving.store.list():
        server.serving.store.remove(entry)
    say(page, "Still there?")
    assert not page.is_visible("#error")
    assert len(contents(page)) == 2
    page.get_by_role("button", name="Remove Remember me").click()
    playwright.expect(page.locator("#messages li")).to_have_count(0)
    page.reload()
    page.wait_for_selector("#model:not(:empty)")
    assert page.locator("#conversations li").count() == 0


def test_a_document_is_read_once(page: "playwright.Page", server: Live, tmp_path: Path) -> None:
    document = tmp_path / "a-tale.txt"
    document.write_text("Once upon a time. " * 800)
    page.set_input_files("#file", document)
    page.wait_for_selector("text=/14\\d\\d\\d tokens, state of/")
    say(page, "Who?")
    read, cached = stats(page)
    assert (read < 60, cached > 14000) == (True, True)
    page.get_by_role("button", name=re.compile("^a-tale.txt")).click()
    say(page, "When?")
    assert stats(page)[1] >= cached
    for entry in server.serving.store.list():
        server.serving.store.remove(entry)
    say(page, "Where?")  # it is read again from what the browser has
    assert stats(page)[1] > 14000
    page.get_by_role("button", name="Remove a-tale.txt").click()
    playwright.expect(page.locator("#documents li")).to_have_count(0)


def test_a_document_that_is_removed_while_it_is_read_stays_away(page: "playwright.Page", tmp_path: Path) -> None:
    document = tmp_path / "doomed.txt"
    document.write_text("Once upon a time. " * 50)
    held = Held(page, "**/v1/states")
    page.set_input_files("#file", document)
    held.wait()
    with page.expect_event("requestfailed"):  # the server is told to stop
        page.get_by_role("button", name="Remove doomed.txt").click()
    playwright.expect(page.locator("#documents li")).to_have_count(0)
    held.release()
    page.set_input_files("#file", {"name": "next.txt", "mimeType": "text/plain", "buffer": b"Another tale. " * 20})
    page.wait_for_selector("text=/tokens, state of/")  # by now the first would be read as well
    playwright.expect(page.locator("#title")).to_have_text("About next.txt")
    assert not page.is_visible("#error")
    load_again(page)
    playwright.expect(page.locator("#documents li")).to_have_count(1)
    playwright.expect(page.locator("#documents li")).to_contain_text("next.txt")


def test_a_file_can_be_dropped(page: "playwright.Page") -> None:
    page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.items.add(new File(["Dropped text. ".repeat(20)], "dropped.md"));
            document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
        }"""
    )
    page.wait_for_selector("text=/3\\d\\d tokens, state of/")


def test_a_setting_that_is_cleared_is_as_at_first(page: "playwright.Page") -> None:
    page.get_by_text("Settings").click()
    for name, first in (("max_tokens", "512"), ("temperature", "0.8"), ("top_p", "0.95")):
        page.fill(f"#{name}", "1")
        page.press(f"#{name}", "Tab")
        page.fill(f"#{name}", "")
        page.press(f"#{name}", "Tab")
        assert page.input_value(f"#{name}") == first
    stored = page.evaluate("JSON.parse(localStorage.getItem('gsa-settings'))")
    assert (stored["max_tokens"], stored["temperature"], stored["top_p"]) == (512, 0.8, 0.95)
    page.fill("#system", "Be brief.")
    page.fill("#system", "")
    page.press("#system", "Tab")
    assert page.evaluate("JSON.parse(localStorage.getItem('gsa-settings')).system") == ""
    say(page, "Hello")
    assert not page.is_visible("#error")


HOSTILE = """# <img src=x onerror=alert(1)>

<script>document.title = "taken"</script> [link](javascript:document.title="taken") [web](https://example.org)

```html
<script>document.title = "taken"</script>
```

- **bold <b>x</b>** `code <i>`
| a | <svg onload=alert(1)> |
|---|---|
| 1 | 2 |
"""


def test_what_a_model_writes_stays_text(page: "playwright.Page") -> None:
    found = page.evaluate(
        """async (text) => {
            const { render } = await import("/static/markdown.js");
            const place = document.getElementById("messages");
            place.replaceChildren(...render(text));
            await new Promise((resolve) => setTimeout(resolve, 200));
            const names = [...place.querySelectorAll("*")].map((node) => node.nodeName.toLowerCase());
            const links = [...place.querySelectorAll("a")].map((node) => node.href);
            return { names: [...new Set(names)].sort(), links, text: place.innerText, title: document.title };
        }""",
        HOSTILE,
    )
    assert found["links"] == ["https://example.org/"]
    assert not {"script", "img", "svg", "b", "i", "iframe"} & set(found["names"])
    assert {"strong", "code", "pre", "table", "li", "h3"} <= set(found["names"])
    assert "onerror=alert(1)" in found["text"]
    assert found["title"] != "taken"


def test_inline_scripts_do_not_run(browser: "playwright.Browser", server: Live) -> None:
    page = browser.new_page()
    page.goto(server.address)
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "document.title = 'taken'";
            document.body.append(script);
        }"""
    )
    assert page.title() != "taken"
    page.close()


def test_it_fits_a_phone_and_the_keyboard(browser: "playwright.Browser", server: Live) -> None:
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport={"width": 360, "height": 640}, color_scheme=scheme)
        page = context.new_page()
        page.goto(server.address)
        page.wait_for_selector("#model:not(:empty)")
        say(page, "word" * 100 + "\n`" + "code" * 100 + "`")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert not page.is_visible("#side")
        page.get_by_role("button", name="Menu").focus()
        page.keyboard.press("Enter")
        assert page.is_visible("#side")
        page.keyboard.press("Escape")
        assert not page.is_visible("#side")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(255, 255, 255)") == (scheme == "light")
        context.close()


def test_everything_has_a_name_for_screen_readers(page: "playwright.Page") -> None:
    say(page, "Hello")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, select")].filter((node) => {
            const label = node.getAttribute("aria-label") ?? node.labels?.[0]?.textContent ?? node.textContent;
            return !label?.trim();
        }).map((node) => node.outerHTML)"""
    )
    assert nameless == []
    assert page.locator("[role=status]").inner_text() == "The answer is complete."


def test_the_browser_asks_for_the_key(browser: "playwright.Browser", closed: Live) -> None:
    context = browser.new_context(http_credentials={"username": "any", "password": KEY})
    page = context.new_page()
    page.goto(closed.address)
    page.wait_for_selector("#model:not(:empty)")
    say(page, "Hello")
    assert len(contents(page)) == 1
    context.close()


def test_a_model_without_a_template_continues_texts(browser: "playwright.Browser") -> None:
    with served("gsa-tiny") as live:
        page = browser.new_page()
        page.goto(live.address)
        page.wait_for_selector("#model:not(:empty)")
        page.get_by_text("Settings").click()
        page.fill("#max_tokens", "20")
        page.press("#max_tokens", "Tab")
        say(page, "It was a dark night, and")
        say(page, " Then")
        assert len(contents(page)) == 2
        assert "cached" in page.locator(".stats").last.inner_text()
        page.close()
