UPDATE task_worker
SET lane=%(number)s::INTEGER, seen_at=statement_timestamp(), backend_pid=%(backend_pid)s::INTEGER, begun_at=%(begun_at)s::TIMESTAMP WITH TIME ZONE, task_ids=%(task_ids)s::BIGINT[], row_versions=%(row_versions)s::BIGINT[]
WHERE task_worker.worker_id = %(worker_id)s::INTEGER AND mod(task_worker.lane, 65536) = %(which)s::INTEGER AND task_worker.ctid = CAST(%(place)s AS tid)
RETURNING CAST(task_worker.ctid AS TEXT) AS place
