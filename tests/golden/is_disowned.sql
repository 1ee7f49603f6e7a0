SELECT task_worker.lane
FROM task_worker
WHERE task_worker.worker_id = %(nobody)s::INTEGER
