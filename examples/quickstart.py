"""The file to copy: a small network on handwritten digits, trained with AdaBayes-K.

    python examples/quickstart.py

Prints the test error, about 1 %, after a few seconds. No download.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from adabayes import AdaBayesK

torch.set_num_threads(1)  # more do not help a network as small as this, and cost much on a busy machine
torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
order = torch.randperm(len(x))
test, train = order[:360], order[360:]

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
# optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
optimizer = AdaBayesK(model.parameters(), lr=3e-3, weight_decay=0.01)

for _ in range(30):  # epochs
    for batch in torch.split(train[torch.randperm(len(train))], 64):
        optimizer.zero_grad()
        loss = cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()

with torch.no_grad():
    wrong = model(x[test]).argmax(1) != y[test]
print(f"test error {100 * wrong.float().mean():.2f} %")
