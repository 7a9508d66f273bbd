"""The lab: the paper's experiments, and fair comparisons of one's own.

    adabayes reproduce --help

A protocol (a TOML file, :mod:`~adabayes.lab.protocol`) names data sets, models, optimizers and seeds; each combination
is a run. :mod:`~adabayes.lab.run` trains one of them in a folder of plain files, :mod:`~adabayes.lab.execute` all of
them, and :mod:`~adabayes.lab.report` shows what came out.
"""
