"""The lab: the paper's experiments, and fair comparisons of your own.

    adabayes reproduce --help

A protocol (a TOML file, :mod:`~adabayes.lab.protocol`) names data sets, models, optimizers and seeds; each combination
is a run. :mod:`~adabayes.lab.run` trains one run, in a folder of plain files. :mod:`~adabayes.lab.execute` does all
runs of a protocol, and :mod:`~adabayes.lab.report` shows the results.
"""
