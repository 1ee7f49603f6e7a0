UPDATE task_worker
SET seen_at=statement_timestamp()
WHERE task_worker.worker_id = %(me)s::INTEGER
