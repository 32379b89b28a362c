"""How prompts become tokens: with and without the first token, through chat templates, refused where there is none."""

from __future__ import annotations

import json

import pytest
from testkit.tiny import SHAPE, write_tokenizer

from rlhfuse.base.errors import InputError
from rlhfuse.config.settings import DataConfig, RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.data.prompts import load_prompts
from rlhfuse.models.tokenizer import load_tokenizer
from rlhfuse.run.preflight import encoder

TEMPLATE = (
    "{% for turn in messages %}{% if turn.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "{{ 'w1 ' if turn.role == 'user' else 'w2 ' }}{{ turn.content }} {% endfor %}"
    "{% if add_generation_prompt %}w2{% endif %}"
)
USER = {"role": "user", "content": "w5 w6"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """(without a chat template, with one); word i has id i + 3, <s> is 1."""
    folders = [tmp_path_factory.mktemp(name) for name in ("plain", "chat")]
    for folder, template in zip(folders, ({}, {"chat_template": TEMPLATE})):
        write_tokenizer(folder, **template)
        shape = SHAPE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(shape))
    return [load_tokenizer(folder, ModelSpec.from_config(folder)) for folder in folders]


def encode(tokenizer, prompt, **data):
    return encoder(tokenizer, RunConfig(data=DataConfig(**data)))(prompt)


@pytest.mark.parametrize(
    "add_bos, ids", [("auto", [1, 8, 9]), ("true", [1, 8, 9]), ("false", [8, 9]), ("True", [1, 8, 9])]
)
def test_text(tokenizers, add_bos, ids):
    assert encode(tokenizers[0], "w5 w6", add_bos=add_bos) == ids


def test_chat_turns_go_through_the_template(tokenizers):
    plain, chat = tokenizers
    asked = [4, 8, 9, 5]  # w1 w5 w6 w2: the turn, and the begin of the answer
    found = encode(chat, [USER])
    assert found[-4:] == asked and found == encode(chat, "w5 w6", apply_chat_template=True)
    assert encode(chat, "w5 w6") == [1, 8, 9]
    for prompt, data in (([USER], {}), ("w5 w6", {"apply_chat_template": True})):
        with pytest.raises(InputError, match="the tokenizer has no chat template; use text prompts"):
            encode(plain, prompt, **data)
    with pytest.raises(InputError, match="chat template refuses the turns .no system turn."):
        encode(chat, [{"role": "system", "content": "w1"}])


def test_what_the_template_refuses_is_named_by_its_row(tokenizers, tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [{"prompt": [USER]}, {"prompt": [{"role": "system", "content": "w1"}]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=f"{file}:2: the tokenizer's chat template refuses"):
        load_prompts([file], "prompt", encoder(tokenizers[1], RunConfig()), 16)


def test_a_first_token_that_the_tokenizer_has_not(tokenizers):
    class WithoutFirst:
        bos_token_id = None

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [3]}

    with pytest.raises(InputError, match="data.add_bos=true, but the tokenizer has no beginning-of-text token"):
        encode(WithoutFirst(), "w5", add_bos="true")
