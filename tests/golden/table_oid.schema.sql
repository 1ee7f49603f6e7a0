SELECT CAST(CAST(to_regclass(concat(quote_ident(%(quote_ident_1)s), %(concat_1)s::VARCHAR, quote_ident(%(quote_ident_2)s))) AS OID) AS BIGINT) AS to_regclass_1
