"""What prompts show that is rarely meant is said once, with the first row and what changes it; else nothing is."""

import json

import pytest
from testkit.tiny import write_text_tokenizer, write_tokenizer
from tokenizers import Tokenizer, processors

from rlhfuse.config.settings import DataConfig, RunConfig
from rlhfuse.data.prompt_notes import prompt_notes
from rlhfuse.data.prompts import load_prompts
from rlhfuse.models.tokenizer import read_tokenizer
from rlhfuse.run.preflight import encoder

USER, SYSTEM = {"role": "user", "content": "w1"}, {"role": "system", "content": "w7"}
ASSISTANT = {"role": "assistant", "content": "w2"}
HEAD = "{% if add_generation_prompt %}w9{% endif %}"
ALL = "{% for m in messages %}w8 {{ m.content }} </s> {% endfor %}" + HEAD
USERS = "{% for m in messages if m.role != 'system' %}{{ m.content }} </s> {% endfor %}" + HEAD


def notes(folder, prompts, template=None, **data):
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(folder, **({"chat_template": template} if template else {}))
    tokenizer, settings = read_tokenizer(folder), DataConfig(**data)
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    loaded = load_prompts([folder / "p.jsonl"], "prompt", encoder(tokenizer, RunConfig(data=settings)), 99)
    how = settings.apply_chat_template, settings.add_bos, settings.chat_template_kwargs
    return prompt_notes(tokenizer, loaded.prompts, {2}, *how)


CASES = {
    "two of <s>": (["w1", "<s> w1", "<s> w2"], None, {}, ("2 of 3", "p.jsonl:2", "twice", "data.add_bos=false")),
    "two by a template": ([[USER]], "<s> <s> w1 w9", {}, ("twice", "chat template")),
    "an end in the row": (["w1", "w1 </s>"], None, {}, ("1 of 2", "p.jsonl:2", "end token </s>", "rows")),
    "no head": ([[USER]], "{{ messages[0].content }} </s>\n", {}, ("end token </s>", "head of an answer")),
    "no system turn": ([[USER], [SYSTEM, USER]], USERS, {}, ("1 of 2", "p.jsonl:2", "system turn", "drops")),
    "goes on": ([[USER, ASSISTANT]], ALL, {}, ("p.jsonl:1", "assistant's turn", "go on")),
    "idle words": ([[USER]], ALL, {"chat_template_kwargs": {"thinking": False}}, ("chat_template_kwargs.thinking",)),
}


@pytest.mark.parametrize("prompts, template, data, words", CASES.values(), ids=CASES)
def test_each_is_said_once_with_row_and_fix(tmp_path, prompts, template, data, words):
    (line,) = notes(tmp_path, prompts, template, **data)
    assert line.startswith("warning: ") and all(word in line for word in words), line


def test_good_prompts_say_nothing(tmp_path):
    assert notes(tmp_path / "chat", [[SYSTEM, USER, ASSISTANT, USER], "w1 w2"], ALL) == ()
    for drops_space in (False, True):
        folder = write_text_tokenizer(tmp_path / str(drops_space), drops_space, chat_template=ALL)
        assert notes(folder, ["hello world", [{"role": "system", "content": " x != y "}, USER]]) == ()


@pytest.mark.parametrize("bos, add", [("<s>", "true"), (None, "false")])
def test_an_end_that_the_tokenizer_adds_is_said(tmp_path, bos, add):
    write_tokenizer(tmp_path, bos_token=bos)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    specials = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=specials)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (line,) = notes(tmp_path, ["w1"])
    assert "the tokenizer adds" in line and f"data.add_bos={add}" in line
    assert notes(tmp_path, ["w1"], add_bos=add) == ()


@pytest.mark.parametrize("kind, told", [("Qwen2Tokenizer", 1), ("PreTrainedTokenizerFast", 0), ("GPT2Tokenizer", 1)])
def test_a_tokenizer_that_transformers_reads_otherwise_is_said(tmp_path, kind, told):
    write_text_tokenizer(tmp_path, drops_space=True, tokenizer_class=kind)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    found = notes(tmp_path, ["hello world"])
    assert len(found) == told and all("p.jsonl:1" in line and "tokenizer_class" in line for line in found)
