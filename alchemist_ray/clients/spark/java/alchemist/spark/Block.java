package alchemist.spark;

import java.io.Closeable;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.IntStream;
import org.apache.spark.unsafe.Platform;

/** Rows that wait to be sent, and the connections to the nodes of their matrix. */
final class Block implements Closeable {
    static final long BASE = Platform.BYTE_ARRAY_OFFSET;
    private static final int BLOCK_BYTES = 8 << 20;
    private static final int MIN_RUN = 16; // rows: longer runs are sent as regions

    final byte[] bytes;
    private final Target target;
    private final int rowBytes;
    private final long[] numbers; // of the rows
    private int count;
    private final List<Connection> connections = new ArrayList<>();
    private final long[] sent; // bytes and nanoseconds, of each node in turn

    Block(Target target) throws IOException {
        this.target = target;
        sent = new long[2 * target.nodes.size()];
        rowBytes = target.cols * target.element.nbytes;
        numbers = new long[Math.max(1, BLOCK_BYTES / Math.max(1, rowBytes))];
        bytes = new byte[numbers.length * rowBytes];
        try {
            for (Target.Node node : target.nodes) {
                connections.add(Connection.open(node, target, bytes.length));
            }
        } catch (IOException | RuntimeException error) {
            close();
            throw error;
        }
    }

    /** How many rows fit. */
    int capacity() {
        return numbers.length;
    }

    /** Where the next row goes; {@link #add} follows. */
    int offset() {
        return count * rowBytes;
    }

    /** The row at {@link #offset} is complete. */
    void add(long number) throws IOException {
        numbers[count++] = number;
        if (count == numbers.length) {
            flush();
        }
    }

    /** Send the rows that wait. */
    void flush() throws IOException {
        int breaks = 0;
        for (int k = 1; k < count; k++) {
            breaks += numbers[k] != numbers[k - 1] + 1 ? 1 : 0;
        }
        if ((long) breaks * MIN_RUN < count) {
            for (int first = 0, last; first < count; first = last) {
                last = first + 1;
                while (last < count && numbers[last] == numbers[last - 1] + 1) {
                    last++;
                }
                putRegion(first, last);
            }
        } else {
            putRows();
        }
        count = 0;
    }

    private void putRegion(int first, int last) throws IOException {
        long[] region = {numbers[first], numbers[last - 1] + 1, 0, target.cols};
        put(region, true, bytes, first * rowBytes);
    }

    /** Send a region that is stored by rows or by columns, without gaps. */
    void put(long[] region, boolean byRow, byte[] stored, int first) throws IOException {
        int itemsize = target.element.nbytes;
        long length = byRow ? region[3] - region[2] : region[1] - region[0];
        for (int k = 0; k < connections.size(); k++) {
            Target.Node node = target.nodes.get(k);
            Connection connection = connections.get(k);
            Share share = new Share(node, region, itemsize, byRow);
            if (share.nbytes() > 0) {
                long began = System.nanoTime();
                connection.beginPut(target.request(node, region, byRow), share.nbytes());
                share.send(connection, stored, first, length * itemsize);
                connection.endPut();
                sent[2 * k] += share.nbytes();
                sent[2 * k + 1] += System.nanoTime() - began;
            }
        }
    }

    /** Rows in any order travel in ascending order, with their numbers. */
    private void putRows() throws IOException {
        Integer[] order = new Integer[count];
        Arrays.setAll(order, k -> k);
        Arrays.sort(order, (a, b) -> Long.compare(numbers[a], numbers[b]));
        ByteBuffer ascending = ByteBuffer.allocate(8 * count).order(ByteOrder.LITTLE_ENDIAN);
        for (int k = 0; k < count; k++) {
            if (k > 0 && numbers[order[k]] == numbers[order[k - 1]]) {
                throw duplicate("row " + numbers[order[k]]);
            }
            ascending.putLong(numbers[order[k]]);
        }
        for (int k = 0; k < connections.size(); k++) {
            long began = System.nanoTime();
            sent[2 * k] +=
                    putRows(target.nodes.get(k), connections.get(k), order, ascending.array());
            sent[2 * k + 1] += System.nanoTime() - began;
        }
    }

    /** The bytes that were sent. */
    private long putRows(Target.Node node, Connection connection, Integer[] order, byte[] ascending)
            throws IOException {
        int itemsize = target.element.nbytes;
        List<int[]> columns = new ArrayList<>();
        long size = 0;
        for (Share.Runs[] product : node.products) {
            int[] cols = IntStream.range(0, target.cols)
                    .filter(product[1]::contains).toArray();
            columns.add(cols);
            for (Integer k : order) {
                size += product[0].contains(numbers[k]) ? cols.length : 0;
            }
        }
        if (size == 0) {
            return 0;
        }
        Map<String, Object> body = target.request(node);
        body.put("rows", ascending);
        connection.beginPut(body, size * itemsize);
        for (int p = 0; p < columns.size(); p++) {
            for (Integer k : order) {
                if (node.products.get(p)[0].contains(numbers[k])) {
                    for (int col : columns.get(p)) {
                        connection.write(bytes, k * rowBytes + col * itemsize, itemsize);
                    }
                }
            }
        }
        connection.endPut();
        return size * itemsize;
    }

    static Failure duplicate(String what) {
        return new Failure(
                "IncompleteMatrixError",
                what + " appears twice: drop duplicates, or add them up");
    }

    /** Wait until the nodes have stored and counted everything; the times of each node. */
    List<Map<String, Object>> finish() throws IOException {
        flush();
        for (Connection connection : connections) {
            connection.beginSync();
        }
        List<Map<String, Object>> times = new ArrayList<>();
        for (int k = 0; k < connections.size(); k++) {
            Map<String, Object> answer = connections.get(k).endSync();
            Map<String, Object> its = new LinkedHashMap<>();
            its.put("node", target.nodes.get(k).number);
            its.put("route", connections.get(k).route());
            its.put("nbytes", sent[2 * k]);
            its.put("send_s", sent[2 * k + 1] / 1e9);
            its.put("receive_s", answer.get("receive_s"));
            its.put("deserialize_s", answer.get("place_s"));
            times.add(its);
        }
        return times;
    }

    @Override
    public void close() throws IOException {
        for (Connection connection : connections) {
            connection.close();
        }
    }
}
