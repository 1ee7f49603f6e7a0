UPDATE task_worker
SET worker_id=%(nobody)s::INTEGER, lane=(-task_worker.lane), seen_at=statement_timestamp(), backend_pid=%(backend_pid)s::INTEGER, task_ids=%(task_ids)s::BIGINT[], row_versions=%(row_versions)s::BIGINT[]
WHERE task_worker.worker_id = %(me)s::INTEGER AND mod(task_worker.lane, 65536) = %(own_lane)s::INTEGER AND task_worker.task_ids @> %(task_ids)s::BIGINT[]
RETURNING task_worker.lane
