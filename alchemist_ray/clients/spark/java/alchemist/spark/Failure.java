package alchemist.spark;

import java.io.IOException;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.Map;

/** An error in the form of {@code mpi_workers.failures}: the name of an error class, and a message. */
final class Failure extends IOException {
    private static final long serialVersionUID = 1;

    private final transient Map<String, Object> fields;

    Failure(String kind, String message) {
        this(fields(kind, message));
    }

    Failure(Map<String, Object> fields) {
        super(String.valueOf(fields.get("message")));
        this.fields = fields;
    }

    Map<String, Object> toMap() {
        return fields;
    }

    private static Map<String, Object> fields(String kind, String message) {
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("kind", kind);
        fields.put("message", message);
        fields.put("facts", Collections.emptyMap());
        return fields;
    }
}
