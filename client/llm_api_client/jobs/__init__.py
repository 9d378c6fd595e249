"""Jobs: a model applied to each row of a data set, kept by the service."""
