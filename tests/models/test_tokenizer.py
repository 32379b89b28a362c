"""Which tokens end a text, and models that fit together: by their tokenizers' contents, not by rows of embeddings."""

import datetime
import io
import json
import re
import signal

import pytest
from testkit.tiny import write_checkpoint, write_tokenizer
from transformers.utils import chat_template_utils

from rlhfuse.base.errors import InputError
from rlhfuse.config.settings import RolloutConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.models import tokenizer as tokenizer_module
from rlhfuse.models.tokenizer import chat_tokens, load_tokenizer, resolve_tokens, with_end_tokens
from rlhfuse.tasks.role import ROLES


def edit(file, **changes):
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **changes}))


@pytest.fixture
def folder(tmp_path):
    return write_tokenizer(write_checkpoint(tmp_path / "actor"))


@pytest.mark.parametrize(
    "generation, config, ends",
    [
        ({"eos_token_id": [2, 7]}, {"eos_token_id": 2}, (2, 7)),
        ({"eos_token_id": 7}, {"eos_token_id": None}, (7,)),
        ({"eos_token_id": None}, {"eos_token_id": [3, 4]}, (3, 4)),
        ({}, {"eos_token_id": 5}, (5,)),
        (None, {"eos_token_id": 5}, (5,)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_end_tokens_are_those_of_generation_config_then_of_config(folder, generation, config, ends):
    edit(folder / "config.json", **config)
    if generation is not None:
        edit(folder / "generation_config.json", **generation)
    assert ModelSpec.from_config(folder).eos_token_ids == ends


@pytest.mark.parametrize("wrong", [[2, 200], "2", [True], -1, 2.0])
def test_an_end_token_that_is_no_id_is_refused(folder, wrong):
    edit(folder / "generation_config.json", eos_token_id=wrong)
    with pytest.raises(InputError, match=r"generation_config.json: eos_token_id .* is not an id in \[0, 200\)"):
        ModelSpec.from_config(folder)


def settled(folder, **rollout):
    spec = ModelSpec.from_config(folder)
    actor, notes = with_end_tokens(spec, load_tokenizer(folder, spec), RolloutConfig(**rollout))
    return actor.eos_token_ids, notes


def test_the_tokenizers_end_token_is_taken_last_and_warned_of_where_it_is_another(folder):
    assert settled(folder) == ((2,), ())
    edit(folder / "config.json", eos_token_id=[7, 9])
    ends, (warning,) = settled(folder)
    assert ends == (7, 9) and warning == (
        "warning: the tokenizer's end token '</s>' (2) ends no response, the model's files name 7, 9: "
        "set rollout.stop_token_ids=[2] if it should"
    )
    assert settled(folder, stop_token_ids=[2]) == settled(folder, ignore_eos=True) == ((7, 9), ())
    edit(folder / "config.json", eos_token_id=None)
    assert settled(folder) == ((2,), ())


def test_no_end_token_at_all_is_refused_unless_it_is_asked_for(folder):
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(InputError, match="names an end token: set rollout.stop_token_ids or rollout.stop, or"):
        settled(folder)
    for asked in ({"ignore_eos": True}, {"stop_token_ids": [5]}, {"stop": ["w5"]}):
        assert settled(folder, **asked) == ((), ())


# models together ------------------------------------------------------------------------------------------------


def pair(tmp_path, actor_rows=320, reward_rows=288, reward_words=257):
    """Folders and shapes of an actor over a tokenizer of 260 tokens, and of a reward model."""
    actor = write_tokenizer(write_checkpoint(tmp_path / "a", vocab_size=actor_rows), words=257)
    reward = write_checkpoint(tmp_path / "r", scalar_head=True, vocab_size=reward_rows)
    if reward_words:
        write_tokenizer(reward, words=reward_words)
    paths = dict(zip(ROLES, (actor, actor, reward, reward)))
    return paths, {role: ModelSpec.from_config(path) for role, path in paths.items()}


def check(paths, specs, required=True, tokenizer=True):
    actor = load_tokenizer(paths["actor"], specs["actor"]) if tokenizer else None
    return resolve_tokens(RolloutConfig(ignore_eos=True), paths, specs, actor, required)[1]


@pytest.mark.parametrize("words", [257, 270])
def test_models_with_the_same_tokens_fit_whatever_their_rows(tmp_path, words):
    assert check(*pair(tmp_path, reward_words=words)) == ()


def test_models_of_equal_size_with_other_tokens_do_not(tmp_path):
    paths, specs = pair(tmp_path, 320, 320)
    file = paths["reward"] / "tokenizer.json"
    raw = json.loads(file.read_text())
    vocab = raw["model"]["vocab"]
    vocab["w40"], vocab["w41"] = vocab["w41"], vocab["w40"]
    file.write_text(json.dumps(raw))
    found = re.escape("has another tokenizer than the actor: token 43 is 'w40' in the actor's and 'w41' in its; all")
    with pytest.raises(InputError, match=f"reward.path=.*/r {found}"):
        check(paths, specs)
    write_tokenizer(paths["reward"], words=200)
    with pytest.raises(InputError, match="token 203 is 'w200' in the actor's and none in its"):
        check(paths, specs)


def test_special_tokens_are_compared_but_not_padding(tmp_path):
    paths, specs = pair(tmp_path)
    edit(paths["reward"] / "tokenizer_config.json", pad_token="w9")
    assert check(paths, specs) == ()
    edit(paths["reward"] / "tokenizer_config.json", eos_token="w9")
    with pytest.raises(InputError, match="eos_token is '</s>' in the actor's and 'w9' in its"):
        check(paths, specs)


def test_without_tokenizer_files_sizes_are_compared_but_a_run_refuses(tmp_path):
    paths, specs = pair(tmp_path, 320, 320, reward_words=0)
    line = "without tokenizer files actor and reward are compared by the size of their vocabularies alone, 320 each; "
    assert check(paths, specs, required=False) == (line + "a run needs the files",)
    assert check(paths, specs, required=False, tokenizer=False) == (line + "a run needs the files",)
    with pytest.raises(InputError, match="reward.path=.*/r has no tokenizer files to hold against the actor's"):
        check(paths, specs)
    paths, specs = pair(tmp_path / "other", 320, 288, reward_words=0)
    with pytest.raises(InputError, match=re.escape("vocab(288) != vocab(320) of the actor, and their tokenizers")):
        check(paths, specs, required=False)


@pytest.fixture
def folder_with_code(folder):
    """It asks to run a file beside it, which would say so."""
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass EvilTok: pass\n")
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.EvilTok", "evil.EvilTok"]})
    return folder


@pytest.mark.parametrize("named", [True, False])
def test_code_of_a_folder_never_runs_and_nobody_is_asked(folder_with_code, monkeypatch, named):
    """Whether transformers has a class for it or not; the answer to its question would be yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    if not named:
        raw = json.loads((file := folder_with_code / "tokenizer_config.json").read_text())
        raw.pop("tokenizer_class", None)
        file.write_text(json.dumps(raw))
    with pytest.raises(InputError, match="tokenizer_config.json: auto_map asks to run code of the folder"):
        load_tokenizer(folder_with_code, ModelSpec.from_config(folder_with_code))
    assert not (folder_with_code / "ran").exists()


def test_code_for_a_model_is_not_needed_and_does_not_run(folder_with_code):
    (folder_with_code / "tokenizer_config.json").unlink()
    edit(folder_with_code / "config.json", auto_map={"AutoConfig": "evil.EvilTok", "AutoTokenizer": "evil.EvilTok"})
    try:
        load_tokenizer(folder_with_code, ModelSpec.from_config(folder_with_code))
    except InputError as error:
        assert "tokenizer of" in str(error) and "\n" not in str(error)
    assert not (folder_with_code / "ran").exists()


@pytest.mark.parametrize(
    "name, text",
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", '{"model": 3}'),
        ("tokenizer_config.json", "null"),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", "9" * 5001),
        ("tokenizer_config.json", '{"tokenizer_class": 3}'),
        ("config.json", json.dumps({"attention_dropout": "a\nb", "model_type": "llama"})),
    ],
)
def test_a_broken_tokenizer_is_one_whole_line(folder, name, text):
    spec = ModelSpec.from_config(folder)
    (folder / name).write_text(text)
    try:
        load_tokenizer(folder, spec)
    except InputError as error:
        assert str(folder) in str(error) and "\n" not in str(error)


def test_a_template_without_end_is_refused(folder, monkeypatch):
    tokenizer, turns = load_tokenizer(folder, ModelSpec.from_config(folder)), [{"role": "user", "content": "w1"}]
    tokenizer.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_module, "TEMPLATE_SECONDS", 0.2)
        with pytest.raises(InputError, match="template refuses the turns .no end after 0.2 s"):
            chat_tokens(tokenizer, turns)
    tokenizer.chat_template = "{% for a in range(2) %}{{ messages[0].content }} {% endfor %}"
    assert chat_tokens(tokenizer, turns)[-2:] == [4, 4]
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


FAULTS = [("chat_template", text) for text in ("** {{ 10 ** (10 ** 8) }}", "{% if 2**9 %}", "{{ 'a' * 99999999 }}")]
FAULTS += [("model_max_length", wrong) for wrong in ("1e9", [3], True, {"a": 1})]


@pytest.mark.parametrize("key, text", FAULTS)
def test_arithmetic_that_no_time_limit_ends_and_a_length_of_another_type_are_named(folder, key, text):
    edit(folder / "tokenizer_config.json", **{key: text})
    with pytest.raises(InputError, match=key.replace("_", ".")):
        tokenizer_module.read_tokenizer(folder)


BODIES = (
    "  {% if true %}w2{% endif %} {{ strftime_now(format='%d %b %Y') }}\n",
    "\n\n{% set d = strftime_now('%A %-d %B %% %%d %H:%M') %}{{ d|upper }} {{ messages[0].content }}",
    "{%- if strftime_now is defined %}{% macro f() %}{{ strftime_now('%j %y') }}{% endmacro %}{{ f() }}{% endif %}\n w",
)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("named", [False, True])
def test_templates_write_the_day_of_the_run_as_transformers_would_have_on_it(folder, monkeypatch, body, named):
    template = [{"name": "default", "template": body}, {"name": "rag", "template": "w4"}] if named else body
    edit(folder / "tokenizer_config.json", chat_template=template)
    tokenizer, turns = tokenizer_module.read_tokenizer(folder), [{"role": "user", "content": "w1"}]
    with monkeypatch.context() as patch:
        day = type("Day", (datetime.datetime,), {"now": classmethod(lambda kind: datetime.datetime(2026, 11, 3))})
        patch.setattr(chat_template_utils, "datetime", day)
        wanted = tokenizer.apply_chat_template(turns, tokenize=False)
    tokenizer_module.fix_day(tokenizer, "2026-11-03")
    assert tokenizer.apply_chat_template(turns, tokenize=False) == wanted and ("26" in wanted or "NOV" in wanted)


def test_an_assistants_last_turn_goes_on_and_words_reach_the_template(folder):
    head = "{% if add_generation_prompt %} w9{% if thinking is defined and not thinking %} w8{% endif %}{% endif %}"
    template = "{% for m in messages %}w9 {{ m.content }} </s>{% endfor %}" + head
    edit(folder / "tokenizer_config.json", chat_template=template)
    tokenizer, user = tokenizer_module.read_tokenizer(folder), {"role": "user", "content": "w1"}
    assert chat_tokens(tokenizer, [user]) == [12, 4, 2, 12]
    assert chat_tokens(tokenizer, [user], thinking=False) == [12, 4, 2, 12, 11]
    assert chat_tokens(tokenizer, [user, {"role": "assistant", "content": "w2"}]) == [12, 4, 2, 12, 5]
    for turns, words in (([user, {"role": "assistant", "tool_calls": [1]}], {}), ([user], {"tokenize": False})):
        with pytest.raises(InputError, match="template refuses the turns"):
            chat_tokens(tokenizer, turns, **words)
