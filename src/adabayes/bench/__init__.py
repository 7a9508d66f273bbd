"""Times optimizer steps, ours and torch's, on the parameter lists of real networks.

Up to five optimizers are in one process at a time, torch's fused AdamW always among them. They take their steps in
random order, so that other work on the machine affects all of them alike: compare ratios, not milliseconds. The whole
of optimizer.step() is timed, with hooks, groups and checks. B/weight is the size of the state, in bytes per weight.
GB/s counts each array that a step must read or write once. "of roof" compares that with a plain loop that reads four
fp32 arrays and writes three of them, measured among the steps. The packages adabound, ivon and schedulefree are
included if they are installed.

The workload small-saved is the workload small after a call of optimizer.state_dict(), as for a checkpoint.

With --matrix, optimizers that work on matrices are timed at the same settings: AdaBayes-K, torch's Muon (with AdamW
for vectors), and SOAP of the package pytorch_optimizer, if it is installed. Some of their steps take longer than
others, so the table has the mean over 40 steps. AdaBayes-K has two rows: from step 128 on, each basis is refreshed
every 10 steps; in the steps 2 to 41, more often. The columns "x Muon" and "x SOAP" say how many times as fast it is.

With --backend jax, jitted steps of adabayes.optax are timed against optax.adamw.
"""

# The command line prints the text above as help, so nothing is imported here: importing torch takes seconds.
