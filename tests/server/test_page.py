"""The page in a real browser, where one is installed: what a person does with it, and what it looks
like.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.serving import TEMPLATE, Served, llm, served

selenium = pytest.importorskip("selenium")
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("chromium and chromedriver are not installed", allow_module_level=True)

from selenium.webdriver import Chrome, ChromeOptions, ChromeService  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

__all__ = ["TEMPLATE", "llm", "served"]
# Where pictures of the page are left to look at; unset: nowhere.
PICTURES = os.environ.get("PAGE_PICTURES")


@pytest.fixture
def page(served: Served) -> Iterator[Chrome]:
    options = ChromeOptions()
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--window-size=1280,860",
        "--disable-gpu",
        "--disable-dev-shm-usage",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with Chrome(options, ChromeService(shutil.which("chromedriver"))) as driver:
        driver.get(f"http://127.0.0.1:{served.port}/")
        yield driver
        assert [
            one for one in driver.get_log("browser") if one["level"] in ("SEVERE", "WARNING")
        ] == []


def text_of(driver: Chrome, name: str) -> str:
    return driver.find_element(By.ID, name).text


def wait(driver: Chrome, holds: Any) -> Any:
    return WebDriverWait(driver, 60, poll_frequency=0.02).until(lambda _: holds())


def say(driver: Chrome, text: str) -> None:
    driver.find_element(By.ID, "prompt").send_keys(text, Keys.ENTER)


def set_limit(driver: Chrome, n: int) -> None:
    driver.find_element(By.ID, "open-settings").click()
    driver.find_element(By.NAME, "max_tokens").send_keys(str(n))
    driver.find_element(By.NAME, "temperature").send_keys("0")
    driver.find_element(By.CSS_SELECTOR, "#settings button").click()


def answers(driver: Chrome) -> list[str]:
    return [
        one.get_attribute("textContent") or ""
        for one in driver.find_elements(By.CSS_SELECTOR, "article.assistant .text")
    ]


def wait_for_end(driver: Chrome, n_answers: int) -> list[str]:
    wait(
        driver,
        lambda: (
            driver.find_element(By.ID, "send").is_displayed() and len(answers(driver)) == n_answers
        ),
    )
    return answers(driver)


def picture(driver: Chrome, name: str) -> None:
    if PICTURES:
        driver.save_screenshot(str(Path(PICTURES) / name))


def test_a_conversation(page: Chrome, served: Served) -> None:
    wait(page, lambda: text_of(page, "model") == "demo")
    set_limit(page, 48)
    text = "def read_lines(path, encoding='utf-8'):"
    say(page, text)
    (first,) = wait_for_end(page, 1)
    conversation = [{"role": "user", "content": text}]
    expected = served.client.chat.completions.create(
        model="demo", messages=conversation, max_tokens=48, temperature=0
    )
    assert first == expected.choices[0].message.content
    n_passes = int(text_of(page, "passes"))
    spans = page.find_elements(By.CSS_SELECTOR, "article.assistant .pass")
    assert len(spans) == n_passes and "tokens in" in (spans[0].get_attribute("title") or "")
    assert float(text_of(page, "per-pass")) == pytest.approx(48 / n_passes, abs=0.01)
    assert "nodes" in (page.find_element(By.ID, "tree").get_attribute("aria-label") or "")
    say(page, "class Queue:")
    assert len(wait_for_end(page, 2)) == 2
    picture(page, "light.png")
    page.find_element(By.ID, "regenerate").click()
    again = wait_for_end(page, 2)
    page.refresh()  # conversations are the browser's own
    assert wait_for_end(page, 2) == again
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": "dark"}]},
    )
    picture(page, "dark.png")
    page.find_element(By.CSS_SELECTOR, "#chats li button:last-child").click()
    assert answers(page) == []


def test_an_answer_is_stopped(page: Chrome, served: Served) -> None:
    set_limit(page, 230)
    say(page, "def f(x):")
    wait(page, lambda: any(answers(page)))
    page.find_element(By.ID, "stop").click()
    wait(page, lambda: text_of(page, "status") == "Stopped")
    assert len(wait_for_end(page, 1)) == 1
    served.wait_until_idle()


def test_everything_is_reached_by_the_keyboard(page: Chrome) -> None:
    reached = set()
    for _ in range(12):
        focused = page.switch_to.active_element
        reached.add(focused.get_attribute("id") or focused.get_attribute("name"))
        focused.send_keys(Keys.TAB)
    assert {"new", "colours", "open-settings", "prompt", "send"} <= reached


CONTRAST = """
const luminance = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((x) => x / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (node) => {
  const colour = getComputedStyle(node).backgroundColor;
  return colour !== "rgba(0, 0, 0, 0)" || !node.parentElement ? colour : ground(node.parentElement);
};
return [...document.querySelectorAll("h1, h2, h3, label, dt, dd, button, .note, .pass, .text, #status")].map((node) => {
  const [a, b] = [luminance(getComputedStyle(node).color), luminance(ground(node))];
  return [node.outerHTML.slice(0, 60), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
}).filter(([, ratio]) => ratio < 4.5);
"""  # noqa: E501


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_their_ground(page: Chrome, scheme: str) -> None:
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    set_limit(page, 8)
    say(page, "import os")
    wait_for_end(page, 1)
    assert page.execute_script(CONTRAST) == []
