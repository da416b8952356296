"""Write the handwritten digits of scikit-learn as pictures in class folders, for the two scripts.

python examples/own-script/make_photos.py photos
"""

import sys
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits


def main(folder: Path) -> None:
    """Write 1,437 pictures to FOLDER/train/0 to FOLDER/train/9, and every fifth one to FOLDER/val."""
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / ("val" if number % 5 == 0 else "train") / str(label) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype("uint8")).resize((32, 32)).save(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
