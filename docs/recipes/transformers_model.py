import torch
import transformers

from pyops.integrations.transformers import accelerate, report, restore

device = "cuda" if torch.cuda.is_available() else "cpu"
config = transformers.LlamaConfig(
    vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
)
model = transformers.LlamaForCausalLM(config).to(device).eval()  # or from_pretrained
prompt = torch.randint(100, (1, 7), device=device)

with torch.no_grad():
    logits, tokens = model(prompt).logits, model.generate(prompt, max_new_tokens=8, do_sample=False)
    accelerate(model)
    torch.testing.assert_close(model(prompt).logits, logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), tokens)
print(f"{device}: the same 8 tokens")
print(*(line for line in str(report(model)).splitlines() if "MLP" in line))  # one line of eight
restore(model)
