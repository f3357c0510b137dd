"""Models, their stage functions, optimizers and data.

Files here are pure JAX and Flax, with numpy for data. They import jaxdt.run, which has the models' fields and sizes in
jaxdt.run.model. jaxdt.model.base has the table of models, jaxdt.model.optim the table of optimizers.
"""
