"""Everything about AdaBayes-K except its rule."""
