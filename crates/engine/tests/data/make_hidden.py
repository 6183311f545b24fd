"""Makes hidden.json, the last hidden state of the tiny golden models of crates/model, and hidden_rows.json, those of all tokens of
a prompt and what the model goes on with, by PyTorch.

Usage: python make_hidden.py   (needs torch and transformers)
"""

import json
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM

HERE = Path(__file__).parent
GOLDEN = HERE / "../../../model/tests/data/golden"
PROMPT = list(range(3, 24))

torch.set_grad_enabled(False)
hidden = {}
for name in ["llama", "qwen3", "gemma3"]:
    model = AutoModel.from_pretrained(GOLDEN / name, dtype=torch.float32, attn_implementation="eager").eval()
    model = getattr(model, "language_model", model)
    last = model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
    hidden[name] = [round(x, 6) for x in last.tolist()]
(HERE / "hidden.json").write_text(json.dumps({"prompt": PROMPT, "hidden": hidden}) + "\n")

model = AutoModelForCausalLM.from_pretrained(GOLDEN / "llama", dtype=torch.float32, attn_implementation="eager").eval()
tokens = list(PROMPT)
for _ in range(14):
    tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
rows = model.model(torch.tensor([tokens])).last_hidden_state[0]
rows = [[round(x, 6) for x in row.tolist()] for row in rows]
golden = {"num_prompt_tokens": len(PROMPT), "tokens": tokens, "rows": rows}
(HERE / "hidden_rows.json").write_text(json.dumps(golden) + "\n")
