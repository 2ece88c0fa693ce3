"""An image that can't be decoded while training, and a chat template of one's own: whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import run_cli
from tests.train.conftest import options
from vlmtrain.data.template import QWEN_TEMPLATE

TEMPLATE = QWEN_TEMPLATE.replace("You are a helpful assistant.", "Answer in one word.")


def rows(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_skipped_counted_and_limited(model, conversations, tmp_path):
    """Two data-parallel ranks. Two steps leave the sample out (twice where they reach the second
    epoch) and end well, the template beside the weights; the run that goes on meets it again, above
    the limit: once in a step, or twice where an epoch ends in the step."""
    import transformers

    samples = json.loads(conversations.read_text())
    bad = next(sample for sample in samples if len(sample.get("image", ())) == 1)
    whole = Path(bad["image"][0]).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) * 6 // 10])
    bad["image"] = str(tmp_path / "cut.jpg")
    data, template, output = tmp_path / "c.json", tmp_path / "own.jinja", tmp_path / "run"
    data.write_text(json.dumps(samples))
    template.write_text(TEMPLATE)
    more = ["--nproc=2", "--loader.unreadable=skip", "--loader.no_verify"]
    more += [f"--loader.template={template}"]
    done = run_cli(options(model, data, output, "--train.steps=2", *more))
    assert done.code == 0, done.output[-3000:]
    lines = [line for line in done.output.splitlines() if line.startswith("skipped: ")]
    assert 1 <= len(lines) <= 2, done.output
    for line in lines:
        assert f"sample {bad['id']!r}: {bad['image']} is not an image or is cut short" in line
    first = rows(output)
    counts = [row["skipped"] for row in first]
    assert counts[-1] == len(lines) and counts == sorted(counts) and len(counts) == 2

    for folder in (output / "hf", *(output / "checkpoints").glob("step-*")):
        assert (folder / "chat_template.jinja").read_text() == TEMPLATE, folder
    question = [{"role": "user", "content": "Why?"}]
    asked = transformers.AutoTokenizer.from_pretrained(output / "hf").apply_chat_template(
        question, tokenize=False, add_generation_prompt=True
    )
    assert asked == (
        "<|im_start|>system\nAnswer in one word.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    config = json.loads((output / "hf" / "tokenizer_config.json").read_text())
    assert config.get("chat_template", TEMPLATE) == TEMPLATE  # where older transformers look

    more += ["--checkpoint.resume=latest", f"--loader.skip_limit={len(lines)}"]
    done = run_cli(options(model, data, output, "--train.epochs=4", *more))
    assert done.code == 1, done.output[-3000:]
    said = [line for line in done.output.splitlines() if line.startswith("vlmtrain: ")]
    assert len(said) == 1 and "Traceback" not in done.output, done.output
    limit = f"samples could not be read, more than the {len(lines)} that --loader.skip_limit allows"
    assert any(f" {len(lines) + again} {limit}" in said[0] for again in (1, 2)), said[0]
    assert f"sample {bad['id']!r}" in said[0]
    assert rows(output)[: len(first)] == first
