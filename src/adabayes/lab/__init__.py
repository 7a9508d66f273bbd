"""The lab: the paper's experiments, and fair comparisons of one's own.

    adabayes reproduce --help

A protocol (a TOML file) names data sets, models, optimizers and seeds; :mod:`~adabayes.lab.protocol` turns it into runs,
:mod:`~adabayes.lab.training` trains one of them, :mod:`~adabayes.lab.sweep` all, and :mod:`~adabayes.lab.results` tells
what came out. A run is a folder of plain files (:mod:`~adabayes.lab.store`).
"""
