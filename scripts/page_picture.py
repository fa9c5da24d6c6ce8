"""Write docs/page.png, the web page of a running server: `python scripts/page_picture.py URL`.

The server of the picture streams the model of `make run`:
`offload-rt serve demo-cache/SmolLM2-135M-Instruct-1600MB --device-memory 600MB`.
Needs chromium and chromedriver.
"""

import argparse
import shutil
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

OUT = Path(__file__).resolve().parents[1] / "docs" / "page.png"
QUESTIONS = (
    "What is the capital of France, and what is it famous for?",
    "Give me three tips for learning a language.",
)
N_TOKENS = 128
# Longest time of an answer.
PATIENCE_S = 600


def ask(browser: Chrome, question: str) -> None:
    """Ask a question in a new conversation and wait for the end of the answer."""
    browser.find_element(By.ID, "new").click()
    browser.find_element(By.ID, "prompt").send_keys(question, Keys.ENTER)
    send = browser.find_element(By.ID, "send")
    wait = WebDriverWait(browser, PATIENCE_S)
    wait.until(lambda _: not send.is_displayed())
    wait.until(lambda _: send.is_displayed())


def main() -> None:
    """Ask the questions greedily and save the page."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("url")
    options = ChromeOptions()
    for flag in ("headless=new", "no-sandbox", "window-size=1280,860", "disable-gpu"):
        options.add_argument(f"--{flag}")
    with Chrome(options, ChromeService(shutil.which("chromedriver"))) as browser:
        browser.get(flags.parse_args().url)
        browser.find_element(By.ID, "open-settings").click()
        browser.find_element(By.NAME, "max_tokens").send_keys(str(N_TOKENS))
        browser.find_element(By.NAME, "temperature").send_keys("0")
        browser.find_element(By.ID, "as-default").click()
        browser.find_element(By.CSS_SELECTOR, "#settings button[type=submit]").click()
        for question in QUESTIONS:
            ask(browser, question)
        browser.save_screenshot(str(OUT))


if __name__ == "__main__":
    main()
