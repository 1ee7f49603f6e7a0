INSERT INTO task_worker (worker_id, lane, host, pid, server_started_at, is_direct) VALUES (%(worker_id)s::INTEGER, %(lane)s::INTEGER, %(host)s::VARCHAR, %(pid)s::INTEGER, pg_postmaster_start_time(), %(is_direct)s) ON CONFLICT (worker_id, lane) DO UPDATE
SET server_started_at = excluded.server_started_at, seen_at = statement_timestamp(), is_direct = excluded.is_direct
