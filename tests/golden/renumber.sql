UPDATE task_worker
SET lane=mod(task_worker.lane, 65536)
WHERE task_worker.worker_id = %(me)s::INTEGER
