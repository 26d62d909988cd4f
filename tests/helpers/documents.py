"""Documents of files, read the plain way."""

import numpy as np

from mtpjax.data.packing import Document


def file_documents(paths) -> list[Document]:
    """Each file as a document of its bytes."""
    return [Document(str(path), np.frombuffer(path.read_bytes(), np.uint8)) for path in paths]
