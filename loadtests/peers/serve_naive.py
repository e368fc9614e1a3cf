"""What a user writes first: FastAPI, one synchronous endpoint (so Starlette's pool of 40 threads), one process, a multipart upload."""

from fastapi import FastAPI, UploadFile

import work

app = FastAPI()
model = work.open_model()


@app.post("/predict")
def predict(image: UploadFile) -> dict:
    return work.classify(model, [image.file.read()])[0]
