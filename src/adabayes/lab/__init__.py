"""The lab: the paper's experiments, and fair comparisons of one's own.

    adabayes reproduce --help

A protocol (a TOML file) names data sets, models, optimizers and seeds; :mod:`~adabayes.lab.protocol` makes runs of it,
:mod:`~adabayes.lab.training` trains one of them, :mod:`~adabayes.lab.sweep` all, and :mod:`~adabayes.lab.results` says
what came out, :mod:`~adabayes.lab.report` on a page. A run is a folder of plain files (:mod:`~adabayes.lab.store`).
"""
