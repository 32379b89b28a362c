"""The single-process reference agrees with transformers, so that what is compared with it is compared with them."""

from __future__ import annotations

import pytest
import torch
from testkit.training_case import write_model
from testkit.training_pair import make_batch
from testkit.whole_model import SGD, train_whole


@pytest.mark.parametrize(
    "scalar_head, tied, kind",
    [(False, False, "llama"), (False, True, "llama"), (True, False, "llama"), (False, True, "qwen3")],
)
def test_first_gradients_are_those_of_transformers(tmp_path, scalar_head, tied, kind):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from rlhfuse.ppo.losses import policy_loss_sum, value_loss_sum

    folder = write_model(tmp_path / "model", seed=3, scalar_head=scalar_head, model_type=kind, tie_word_embeddings=tied)
    batch = make_batch(0, 24)
    made = AutoModelForSequenceClassification if scalar_head else AutoModelForCausalLM
    model = made.from_pretrained(folder, dtype=torch.float32)
    rows = [batch.tokens[a:b][None] for a, b in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:])]
    hidden = torch.cat([model.model(row).last_hidden_state[0] for row in rows])[batch.prediction_index]
    if scalar_head:
        loss, _ = value_loss_sum(model.score(hidden)[:, 0], batch.values, batch.returns, 0.2)
    else:
        logprobs = model.lm_head(hidden).log_softmax(-1).gather(1, batch.tokens[batch.response_index][:, None])[:, 0]
        loss, _ = policy_loss_sum(logprobs, batch.old_logprobs, batch.advantages, 0.2)
    (loss / batch.response_tokens).backward()
    ours = train_whole(folder, [batch], SGD, scalar_head=scalar_head)[0]
    assert float(ours.losses.sum()) == pytest.approx(loss.item() / batch.response_tokens, rel=1e-6)
    scale = min(1.0, SGD.clip_grad / (ours.norm + 1e-6))
    theirs = {name: p.grad for name, p in model.named_parameters() if name in ours.gradients}
    assert theirs.keys() == ours.gradients.keys()
    for name, gradient in ours.gradients.items():
        assert (gradient - scale * theirs[name]).abs().max() <= 2e-6 * gradient.abs().max(), name
