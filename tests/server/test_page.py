"""The web page in headless Chromium: conversations, rendering, keyboard and small screens."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import count as count_from
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.serving import Served, script

from offload_rt import SamplingParams

selenium = pytest.importorskip("selenium")
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("chromium and chromedriver are not installed", allow_module_level=True)

from selenium.common.exceptions import StaleElementReferenceException  # noqa: E402
from selenium.webdriver import Chrome, ChromeOptions, ChromeService  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.remote.webelement import WebElement  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    options = ChromeOptions()
    for flag in ("headless=new", "no-sandbox", "window-size=1280,860", "disable-gpu",
                 "disable-dev-shm-usage"):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with Chrome(options, ChromeService(shutil.which("chromedriver"))) as driver:
        yield driver


@pytest.fixture
def page(browser: Chrome, served: Served, tmp_path: Path) -> Iterator[Chrome]:
    """The page without conversations, in a new tab, which ends without browser warnings."""
    first = browser.current_window_handle
    browser.switch_to.new_window("tab")
    downloads = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Page.setDownloadBehavior", downloads)
    browser.get(f"http://127.0.0.1:{served.port}/")
    browser.execute_script("localStorage.clear()")
    browser.refresh()
    yield browser
    log = browser.get_log("browser")
    browser.close()
    browser.switch_to.window(first)
    assert [entry for entry in log if entry["level"] in ("SEVERE", "WARNING")] == []


def count(driver: Chrome, selector: str) -> int:
    return len(driver.find_elements(By.CSS_SELECTOR, selector))


def wait(driver: Chrome, holds: Any) -> Any:
    # The page may replace an element between its search and its use.
    patience = WebDriverWait(driver, 60, 0.02, (StaleElementReferenceException,))
    return patience.until(lambda _: holds())


def use(driver: Chrome, selector: str, action: Callable[[WebElement], Any]) -> Any:
    """Apply an action to the element of a selector, again if the page replaces it meanwhile."""
    return wait(driver, lambda: (action(driver.find_element(By.CSS_SELECTOR, selector)),))[0]


def click(driver: Chrome, selector: str) -> None:
    use(driver, selector, WebElement.click)


def text_of(driver: Chrome, selector: str) -> str:
    return use(driver, selector, lambda element: element.text)


def is_shown(driver: Chrome, selector: str) -> bool:
    return use(driver, selector, WebElement.is_displayed)


def type_at(driver: Chrome, selector: str, *keys: object) -> None:
    use(driver, selector, lambda element: element.send_keys(*map(str, keys)))


def type_keys(driver: Chrome, *keys: str) -> None:
    """Send keys to the focused element, whichever it is at each key."""
    ActionChains(driver).send_keys(*keys).perform()


def say(driver: Chrome, text: str) -> None:
    type_at(driver, "#prompt", text, Keys.ENTER)


def change_settings(driver: Chrome, **values: object) -> None:
    click(driver, "#open-settings")
    for name, value in values.items():
        type_at(driver, f"[name={name}]", value)
    click(driver, "#settings button[type=submit]")


def start(driver: Chrome, n: int, text: str = "import os") -> str:
    change_settings(driver, max_tokens=n, temperature=0)
    say(driver, text)
    return wait_for_end(driver, 1)[0]


def edit(driver: Chrome, text: str) -> None:
    """Append a text to the first message, and send it again."""
    click(driver, ".user .actions button:last-child")
    type_at(driver, "#edited", text)
    click(driver, "#edited + .actions button")
    wait(driver, lambda: count(driver, ".user .version"))


def regenerate(driver: Chrome) -> list[str]:
    click(driver, ".regenerate")
    wait(driver, lambda: count(driver, ".assistant .version"))
    return wait_for_end(driver, 1)


def export(driver: Chrome, folder: Path) -> Path:
    click(driver, "#export")
    wait(driver, (folder / "conversations.json").exists)
    return folder / "conversations.json"


def branch(driver: Chrome) -> list[dict[str, Any]]:
    """Read the messages of the displayed branch from the browser's storage."""
    return driver.execute_async_script(
        """
        import("/page/store.js").then(({ branch, load, loadConversations }) => {
          const open = loadConversations().find(({ id }) => id === load("open", null));
          arguments[0](open ? branch(open) : []);
        });
        """
    )


def shown(driver: Chrome) -> list[str]:
    """Rendered texts of the answers, read at once because streaming replaces the elements."""
    return driver.execute_script(
        "return [...document.querySelectorAll('article.assistant > .text')]"
        ".map((text) => text.textContent);"
    )


def focused(driver: Chrome) -> str:
    """The focused element's name, read at once because rendering replaces elements; "" for none."""
    return driver.execute_script(
        "const { id, name, ariaLabel } = document.activeElement;"
        "return id || name || ariaLabel || '';"
    )


def wait_for_end(driver: Chrome, n_answers: int) -> list[str]:
    wait(driver, lambda: is_shown(driver, "#send") and len(shown(driver)) == n_answers)
    return [message["content"] for message in branch(driver) if message["role"] == "assistant"]


def render(driver: Chrome, text: str, pieces: list[str]) -> dict[str, Any]:
    """Render a message with the page's own code. Returns text, HTML and the text of each pass."""
    program = """
        const [text, pieces, done] = arguments;
        import("/page/render.js").then(({ render }) => {
          const made = document.createElement("div");
          made.append(render(text, pieces.map((part) => ({ text: part, tokens: 1, seconds: 1 }))));
          const html = made.innerHTML;
          made.querySelectorAll("button.copy").forEach((button) => button.remove());
          const spans = [...made.querySelectorAll(".pass")];
          const passes = spans.map((span) => [span.title.split(":")[0], span.textContent]);
          done({ html, text: made.textContent, passes });
        });
        """
    return driver.execute_async_script(program, text, pieces)


CONTRAST = """
const luminance = (colour) => {
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = colour.match(/[\\d.]+/g).map((x) => linear(x / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (node) => {
  const colour = getComputedStyle(node).backgroundColor;
  return colour !== "rgba(0, 0, 0, 0)" || !node.parentElement ? colour : ground(node.parentElement);
};
const texts = "h1, h2, h3, label, dt, dd, button, .note, .pass, .text, #status";
return [...document.querySelectorAll(texts)].map((node) => {
  const [a, b] = [luminance(getComputedStyle(node).color), luminance(ground(node))];
  return [node.outerHTML.slice(0, 60), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
}).filter(([, ratio]) => ratio < 4.5);
"""


def test_conversation_shows_the_answer_of_the_api_and_survives_a_reload(page, served):
    wait(page, lambda: text_of(page, "#model") == "demo")
    text = "def read_lines(path, encoding='utf-8'):"
    first = start(page, 48, text)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 48, "temperature": 0}
    (choice,) = served.post("/v1/chat/completions", body)[1]["choices"]
    assert first == choice["message"]["content"]
    n_passes = int(text_of(page, "#passes"))
    assert count(page, "article.assistant .pass")
    assert float(text_of(page, "#per-pass")) == pytest.approx(48 / n_passes, abs=0.01)
    for name, label in (("tree", "nodes"), ("link", f"{n_passes} passes")):
        assert count(page, f"#{name}[aria-label*='{label}']")
    say(page, "class Queue:")
    both = wait_for_end(page, 2)
    page.refresh()
    assert wait_for_end(page, 2) == both
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        assert page.execute_script(CONTRAST) == [], f"contrast of a {scheme} page"


def test_answer_continues_while_another_conversation_is_open(page):
    change_settings(page, max_tokens=100)
    say(page, "def f(x):")
    wait(page, lambda: any(shown(page)))
    click(page, "#new")
    assert is_shown(page, "#send") and not count(page, "article")
    click(page, "#chats .open")
    (whole,) = wait_for_end(page, 1)
    assert whole and text_of(page, "#status") == ""


def test_conversations_are_renamed_searched_exported_imported_and_deleted(page, tmp_path):
    start(page, 4)
    click(page, "[aria-label^=Rename]")
    use(page, "#new-title", WebElement.clear)
    type_at(page, "#new-title", "Paths", Keys.ENTER)
    wait(page, lambda: text_of(page, "#chats .open") == "Paths")
    for text, n_expected in (("nowhere", 0), ("IMPORT O", 1), ("p", 1)):
        use(page, "#search", WebElement.clear)
        type_at(page, "#search", text)
        assert count(page, "#chats li") == n_expected
    before = branch(page)
    path = export(page, tmp_path)
    for answer, n_left in ((Keys.ESCAPE, 1), ("", 0)):
        click(page, "[aria-label^=Delete]")
        if answer:
            type_keys(page, answer)
        else:
            click(page, "#confirm-yes")
        wait(page, lambda n=n_left: count(page, "#chats li") == n)
    (tmp_path / "other.json").write_text('{"conversations": [{"title": 1}]}')
    for file, status in ((path, "Imported 1"), ("other.json", "no conversations of this page")):
        type_at(page, "#import-file", tmp_path / file)
        wait(page, lambda status=status: status in text_of(page, "#status"))
        assert branch(page) == before


def test_attached_file_is_sent_with_the_message(page, served, tmp_path, monkeypatch):
    (tmp_path / "notes.md").write_text("```\ncode\n```\n")
    (tmp_path / "binary.bin").write_bytes(bytes(range(256)))
    (tmp_path / "large.txt").write_text("x" * 300_000)
    Image.new("RGB", (6, 4), "teal").save(tmp_path / "teal.png")
    change_settings(page, max_tokens=4)
    for name, place, shown in (
        ("binary.bin", "#status", "is no text"), ("large.txt", "#status", "at most 262144"),
        ("teal.png", "#status", "demo reads text only; teal.png is an image"),
        ("notes.md", "#attached", "notes.md"),
    ):  # fmt: skip
        type_at(page, "#attach-files", tmp_path / name)
        wait(page, lambda place=place, shown=shown: shown in text_of(page, place))
        assert count(page, "#attached li") == (name == "notes.md")
    requests = script(served.llm, monkeypatch, "An answer")
    say(page, "Explain")
    assert wait_for_end(page, 1) == ["An answer"]
    ((prompt,), _), *_ = requests
    sent = "Explain\n\nnotes.md:\n````\n```\ncode\n```\n\n````"
    assert served.llm.tokenizer.decode(prompt, skip_special_tokens=True) == f"{sent}\n"
    assert text_of(page, ".file summary") == "notes.md"


PUT = """
const [event, bytes] = arguments, data = new DataTransfer();
data.items.add(new File([new Uint8Array(bytes)], `${event}.png`, { type: "image/png" }));
const options = { bubbles: true, clipboardData: data, dataTransfer: data };
const made = event === "paste" ? new ClipboardEvent(event, options) : new DragEvent(event, options);
document.getElementById("prompt").dispatchEvent(made);
"""
PHONE = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
SCROLLED = "return document.documentElement.scrollWidth"
# Natural width of each loaded image of the conversation.
WIDTHS = "return [...document.querySelectorAll('article img')].map((image) => image.naturalWidth)"


def test_images_are_attached_sent_and_kept(page, vision, tmp_path):
    path = tmp_path / "teal.png"
    Image.new("RGB", (60, 40), "teal").save(path)
    (tmp_path / "noise.png").write_bytes(path.read_bytes() + os.urandom(200_000))
    parts = [{"type": "image", "image": path}] * 3

    def expected(text: str) -> str:
        turn = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
        return vision.llm.chat([turn], SamplingParams(max_tokens=4, temperature=0))[0].text

    def wait_for_images(n: int) -> None:
        wait(page, lambda: count(page, "#attached img") == n)

    def are_shown() -> bool:
        return page.execute_script(WIDTHS) == [60] * 3

    page.get(f"http://127.0.0.1:{vision.port}/")
    wait(page, lambda: text_of(page, "#model") == "demo")
    change_settings(page, max_tokens=4, temperature=0)
    type_at(page, "#attach-files", tmp_path / "noise.png")
    wait(page, lambda: "the server accepts 200000" in text_of(page, "#status"))
    type_at(page, "#attach-files", path)
    wait_for_images(1)
    type_at(page, "#attached button", Keys.ENTER)
    wait(page, lambda: not count(page, "#attached li"))
    assert focused(page) == "prompt"
    type_at(page, "#attach-files", path)
    wait_for_images(1)
    for n, event in enumerate(("paste", "drop"), 2):
        page.execute_script(PUT, event, [*path.read_bytes()])
        wait_for_images(n)
    say(page, "What?")
    assert wait_for_end(page, 1) == [expected("What?")]
    wait(page, are_shown)
    page.refresh()
    wait(page, are_shown)
    edit(page, " Why?")
    assert wait_for_end(page, 1) == [expected("What? Why?")]
    exported = export(page, tmp_path)
    click(page, "[aria-label^=Delete]")
    click(page, "#confirm-yes")
    wait(page, lambda: not count(page, "#chats li"))
    type_at(page, "#import-file", exported)
    wait(page, are_shown)
    assert regenerate(page) == [expected("What? Why?")]
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    page.execute_script(PUT, "paste", [*path.read_bytes()])
    wait_for_images(1)
    assert page.execute_script(SCROLLED) <= 390


MARKDOWN = """# Title
A *quick* `inline code` [link](http://example.com/a?b=c d) & <b>bold</b> <script>alert(1)</script>
- item one
- item **two**

| a | b |
|---|---|
| x | y |
```python
def add(first, second):
    return first + second  # sum
```

    indented __init__ code
"""


def test_marks_of_passes_colour_words_and_never_change_the_text(page):
    plain = render(page, MARKDOWN, [])
    assert "<script" not in plain["html"] and "hljs-keyword" in plain["html"]
    assert all(f"<{tag}" in plain["html"] for tag in ("h1", "em", "li", "table", "pre"))
    assert plain["passes"] == []
    for size in (1, 2, 3, 5, 11):
        pieces = [MARKDOWN[i : i + size] for i in range(0, len(MARKDOWN), size)]
        rendered = render(page, MARKDOWN, pieces)
        assert rendered["text"] == plain["text"]
        assert not max(rendered["html"]) >= "\U000f0000"
        numbers = [int(name.split()[1]) for name, _ in rendered["passes"]]
        assert numbers == sorted(numbers) and max(numbers) <= len(pieces)
    # A pass that begins between two asterisks is coloured from the next letter on.
    rendered = render(page, "one two **three** four", ["one ", "two **", "three** fo", "ur"])
    assert rendered["passes"] == [
        ["pass 1", "one "], ["pass 2", "two "], ["pass 2", "t"], ["pass 3", "hree"],
        ["pass 3", " fo"], ["pass 4", "ur"],
    ]  # fmt: skip


def test_small_screen_shows_statistics_and_has_no_sideways_scroll(page):
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    page.refresh()
    start(page, 24, "def read_lines(path, encoding='utf-8'):")
    assert "tokens/s" in text_of(page, "#rate")
    assert page.execute_script(SCROLLED) <= page.execute_script("return innerWidth") == 390
    click(page, "#menu")
    assert focused(page) == "new"
    type_keys(page, Keys.ESCAPE)
    assert focused(page) == "menu"
    click(page, "#statistics summary")
    assert is_shown(page, "#tree")


def test_answer_is_stopped(page, served, monkeypatch):
    """The engine waits in its fourth pass, so that the answer is not complete."""
    is_stopped = threading.Event()
    step, numbers = served.llm.engine.step, count_from(1)

    def step_held():
        if next(numbers) == 4:
            is_stopped.wait(30)
        return step()

    monkeypatch.setattr(served.llm.engine, "step", step_held)
    change_settings(page, max_tokens=230)
    say(page, "def f(x):")
    wait(page, lambda: any(shown(page)))
    click(page, "#stop")
    wait(page, lambda: text_of(page, "#status") == "Stopped")
    is_stopped.set()
    assert len(wait_for_end(page, 1)) == 1
    served.wait_until_idle()


def test_versions_titles_settings_and_the_focus(page):
    """Tab reaches every control, Escape discards an edit, and the focus stays on the page."""
    reached = set()
    for _ in range(16):
        reached.add(focused(page))
        type_keys(page, Keys.TAB)
    controls = {"new", "search", "export", "import", "colours", "open-settings", "prompt"}
    assert controls | {"attach", "send"} <= reached
    first = start(page, 2)

    def press(selector: str, *keys: str) -> str:
        """Press a button by Enter, then send keys to the focused element; returns the focus."""
        type_at(page, selector, Keys.ENTER)
        if keys:
            type_keys(page, *keys)
        wait(page, lambda: not count(page, "dialog[open], #edited"))
        return wait(page, lambda: focused(page))

    for keys, title in (("sys", Keys.ESCAPE), "import os"), (("sys", Keys.ENTER), "import ossys"):
        press("[aria-label^=Rename]", Keys.END, *keys)
        assert text_of(page, "#chats .open") == title
    assert press("[aria-label^=Rename]", Keys.ENTER) == "prompt"
    assert press("#open-settings", "Be terse.", Keys.ESCAPE) == "open-settings"
    assert press(".user .actions button:last-child", Keys.ESCAPE) == "prompt"
    assert regenerate(page) == [first]
    assert text_of(page, ".assistant .version") == "2/2"
    assert press("[aria-label='Previous version']") == "Next version"
    edit(page, "\nimport sys")
    wait_for_end(page, 1)
    assert branch(page)[0]["content"] == "import os\nimport sys"
    click(page, ".user [aria-label='Previous version']")
    assert [message["content"] for message in branch(page)] == ["import os", first]
    change_settings(page, system="Be brief.")
    stored = "return JSON.parse(localStorage.conversations)[0].settings.system"
    wait(page, lambda: page.execute_script(stored) == "Be brief.")
    defaults = page.execute_script("return JSON.parse(localStorage.defaults)")
    assert defaults == {"max_tokens": 2, "temperature": 0}
