"""Train a small network on handwritten digits with Keras: KERAS_BACKEND=jax flockstep launch -n 2 digits_keras.py."""

import keras
from sklearn.datasets import load_digits

import flockstep
from flockstep.keras import Flockstep

keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
rank, workers = flockstep.rank(), flockstep.workers()
own = slice(rank, 1437 - 1437 % workers, workers)  # the same number of samples for every rank
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
model.compile(
    optimizer=keras.optimizers.SGD(0.1, momentum=0.5),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(
    images[own],
    labels[own],
    batch_size=32,
    epochs=15,
    callbacks=[Flockstep("local_sgd(period=8)")],
    validation_data=(images[1437:], labels[1437:]),
    verbose=0,
)
_, accuracy = model.evaluate(images[1437:], labels[1437:], verbose=0)
if flockstep.is_main():
    print(f"test accuracy {accuracy:.3f}")
