"""REINFORCE on a walk along a line: an episode ends at one of two ends, after a number of steps that nobody knows."""

import sys

import torch
from torch import nn

import flockstep

CELLS, EPISODES = 9, 80


def walk(policy):
    """Play one episode; return the log-probabilities of its actions, and whether it ended on the right."""
    place, chances = CELLS // 2, []
    while 0 < place < CELLS - 1:
        draws = torch.distributions.Categorical(
            logits=policy(nn.functional.one_hot(torch.tensor(place), CELLS).float())
        )
        action = draws.sample()
        chances.append(draws.log_prob(action))
        place += 2 * int(action) - 1
    return torch.stack(chances), place > 0


torch.manual_seed(flockstep.rank())
policy = nn.Linear(CELLS, 2)
optimizer = torch.optim.Adam(policy.parameters(), lr=0.03)
optimizer = flockstep.distribute(policy, optimizer, sys.argv[1])

for _ in range(EPISODES):
    chances, won = walk(policy)
    optimizer.zero_grad()
    (-chances.sum() * (1.0 if won else -1.0)).backward()
    optimizer.step()
optimizer.finish()

with torch.no_grad():
    print(1 - sum(walk(policy)[1] for _ in range(50)) / 50)
