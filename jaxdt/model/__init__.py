"""Models, their stage functions, optimizers and data.

Files here are pure JAX and Flax, with numpy for data. They import jaxdt.run, which has the models' options in
jaxdt.run.model. jaxdt.model.base has the table of families, which stand in jaxdt.model.families; jaxdt.model.derive
reads their facts off them. jaxdt.model.optim has the table of optimizers.
"""
