package alchemist.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.IntStream;

/** A matrix on a gang as the session describes it, in JSON; see {@code jvm.py}. */
final class Target {
    static final ObjectMapper JSON = new ObjectMapper();

    /** The rows and columns that a rank holds. */
    static final class Held {
        final int rank;
        final Share.Runs rows, cols;

        private Held(JsonNode json) {
            rank = json.get(0).asInt();
            rows = runs(json.get(1));
            cols = runs(json.get(2));
        }
    }

    /** One node, the ranks that take part in the transfer, and what they hold together. */
    static final class Node {
        final int number;
        final String host;
        final int port;
        final List<Object> ranks = new ArrayList<>();
        final List<Held> held = new ArrayList<>(); // of each of the ranks
        final List<Share.Runs[]> products = new ArrayList<>();
        final long chunk;

        private Node(JsonNode json) {
            number = json.get("number").asInt();
            host = json.get("host").asText();
            port = json.get("port").asInt();
            chunk = json.get("chunk").asLong();
            for (JsonNode each : json.get("ranks")) {
                held.add(new Held(each));
                ranks.add(held.get(held.size() - 1).rank);
            }
            for (JsonNode product : json.get("products")) {
                products.add(new Share.Runs[] {runs(product.get(0)), runs(product.get(1))});
            }
        }
    }

    private static Share.Runs runs(JsonNode json) {
        return new Share.Runs(json.get(0).asLong(), json.get(1).asLong(), json.get(2).asLong());
    }

    final String token;
    final long matrix;
    final long rows;
    final int cols;
    final Element element;
    final boolean mapped; // the ranks' memory, by processes on their node
    final List<Node> nodes = new ArrayList<>();

    Target(JsonNode json) {
        token = json.get("token").asText();
        matrix = json.get("matrix").asLong();
        rows = json.get("rows").asLong();
        cols = json.get("cols").asInt();
        element = Element.of(json.get("dtype").asText());
        mapped = json.get("mapped").asBoolean();
        json.get("nodes").forEach(node -> nodes.add(new Node(node)));
    }

    /** All columns. */
    int[] columns() {
        return IntStream.range(0, cols).toArray();
    }

    /** The map of a PUT or GET. */
    Map<String, Object> request(Node node) {
        Map<String, Object> body = new LinkedHashMap<>();
        body.put("matrix", matrix);
        body.put("ranks", node.ranks);
        return body;
    }

    /** The same of a region (row0, row1, col0, col1) that travels by rows or by columns. */
    Map<String, Object> request(Node node, long[] region, boolean byRow) {
        Map<String, Object> body = request(node);
        body.put("region", Arrays.asList(region[0], region[1], region[2], region[3]));
        body.put("order", byRow ? "C" : "F");
        return body;
    }

    static Target parse(String json) {
        try {
            return new Target(JSON.readTree(json));
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }
}
