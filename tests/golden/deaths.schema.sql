SELECT claimed.task_id, (SELECT sum(cardinality(lane.task_ids)) AS sum_1
FROM jobs.enum_job_worker AS lane
WHERE lane.worker_id = other.worker_id) AS beside, other.lane < 0 AS is_taken, other.backend_pid IS NOT NULL AS is_late, other.worker_id != %(worker_id)s::INTEGER AND (other.is_direct AND pg_try_advisory_xact_lock_shared(1885828204, other.worker_id) OR NOT other.is_direct) AS is_gone
FROM jobs.enum_job_worker AS other JOIN unnest(other.task_ids, other.row_versions) AS held(task_id, version) ON true JOIN unnest(%(task_ids)s::BIGINT[], %(row_versions)s::BIGINT[]) AS claimed(task_id, version) ON claimed.task_id = held.task_id AND claimed.version = held.version
WHERE (other.worker_id != %(worker_id)s::INTEGER OR mod(other.lane, 65536) != %(own_lane)s::INTEGER) AND other.task_ids && %(task_ids)s::BIGINT[] AND other.server_started_at = pg_postmaster_start_time()
