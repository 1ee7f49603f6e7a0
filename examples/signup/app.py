"""The web application: POST /signup answers at once, and the welcome e-mail follows.

DATABASE_URL=postgresql+psycopg://.. uvicorn signup.app:app
"""

from __future__ import annotations

import os

from argon2 import PasswordHasher
from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel, Field
from sqlalchemy import Select, create_engine, select
from sqlalchemy.dialects.postgresql import insert

from pgtask_sa import insert_task
from signup.models import Task, Usr

engine = create_engine(os.environ["DATABASE_URL"])
# What OWASP recommends where many may sign up at once: one core, for some ten milliseconds.
hasher = PasswordHasher(time_cost=2, memory_cost=19 * 1024, parallelism=1)
app = FastAPI()


class Signup(BaseModel):
    email: str = Field(pattern=r"^[^@\s]+@[^@\s]+$", max_length=254)
    password: str = Field(min_length=8, max_length=200)


def signup_statement(email: str, password_hash: str) -> Select[tuple[int]]:
    """Insert the user and the task in one statement: there is never one without the other.

    The task is inserted from the rows that the insert of the user returned. Its params name their
    usr_id, which need not travel to the application and back; and where the address was taken
    there is no new row, and so no task.
    """
    new_usr = (
        insert(Usr)
        .values(email=email, password_hash=password_hash)
        .on_conflict_do_nothing(index_elements=[Usr.email])
        .returning(Usr.usr_id)
        .cte("new_usr")
    )
    new_task = insert_task("SEND_EMAIL_WELCOME", {"usr_id": new_usr.c.usr_id}, task_class=Task).cte(
        "new_task"
    )
    return select(new_usr.c.usr_id).add_cte(new_task)


# A plain function, which FastAPI calls in a thread: hashing a password takes a while on purpose.
@app.post("/signup", status_code=204)
def sign_up(signup: Signup, response: Response) -> None:
    statement = signup_statement(signup.email, hasher.hash(signup.password))
    with engine.begin() as connection:
        usr_id = connection.scalar(statement)
    if usr_id is None:
        raise HTTPException(409, "there is an account with this e-mail address")
    # Plain, to keep the example short: whoever changes the number is somebody else. Sign it, or
    # make it the key of a session that you keep, and set `secure=True` behind HTTPS.
    response.set_cookie("usr_id", str(usr_id), httponly=True, samesite="lax")
