UPDATE task
SET run_at=statement_timestamp(), attempts=(task.attempts - %(attempts_1)s::INTEGER), lease_token=NULL
WHERE task.task_id = %(leased_id)s::BIGINT AND task.lease_token = %(token)s::UUID
