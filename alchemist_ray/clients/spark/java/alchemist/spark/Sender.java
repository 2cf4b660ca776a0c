package alchemist.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.Serializable;
import java.util.BitSet;
import java.util.Collections;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.zip.Deflater;
import java.util.zip.DeflaterOutputStream;
import org.apache.spark.TaskContext;
import org.apache.spark.api.java.JavaRDD;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.catalyst.InternalRow;

/**
 * Counts rows, and sends them to the ranks from executors. The session calls it through py4j.
 *
 * <p>A task returns its report, or its failure, as JSON: if it failed, Spark would repeat it, and
 * rows would be written twice. Errors of the data's own computation fail the task as usual.
 */
public final class Sender {
    private static final ObjectMapper JSON = new ObjectMapper();

    private Sender() {}

    /** The rows of one partition, and its number. */
    private static final class Part {
        final int number;
        final Iterator<InternalRow> rows;

        Part(int number, Iterator<InternalRow> rows) {
            this.number = number;
            this.rows = rows;
        }
    }

    /** One task per core, each with whole partitions: a task has its own connections. */
    private static JavaRDD<Part> parts(Dataset<Row> frame, int cores) {
        JavaRDD<InternalRow> rows = frame.queryExecution().toRdd().toJavaRDD();
        return rows.mapPartitionsWithIndex(
                        (number, some) -> Collections.singleton(new Part(number, some)).iterator(),
                        true)
                .coalesce(cores);
    }

    /** The rows of each partition by its number, as JSON, for partitions that have any. */
    public static String count(Dataset<Row> frame, int cores) throws IOException {
        List<long[]> pairs = parts(frame, cores).map(part -> {
            long rows = 0;
            for (; part.rows.hasNext(); part.rows.next()) {
                rows++;
            }
            return new long[] {part.number, rows};
        }).filter(pair -> pair[1] > 0).collect();
        return JSON.writeValueAsString(pairs);
    }

    /** Send rows ordered by partition: p begins at row {@code starts[p]}; the tasks' reports. */
    public static List<String> ordered(Dataset<Row> frame, int cores, String spec) {
        return parts(frame, cores).mapPartitions(new Task(spec, false)).collect();
    }

    /** Send rows whose numbers, below 2^31, are in the first column. */
    public static List<String> numbered(Dataset<Row> frame, int cores, String spec) {
        return parts(frame, cores).mapPartitions(new Task(spec, true)).collect();
    }

    private static final class Task
            implements org.apache.spark.api.java.function.FlatMapFunction<Iterator<Part>, String>,
                    Serializable {
        private static final long serialVersionUID = 1;

        private final String spec;
        private final boolean numbered;

        Task(String spec, boolean numbered) {
            this.spec = spec;
            this.numbered = numbered;
        }

        @Override
        public Iterator<String> call(Iterator<Part> parts) throws Exception {
            TaskContext context = TaskContext.get();
            int attempt = Math.max(context.attemptNumber(), context.stageAttemptNumber());
            Map<String, Object> report = new LinkedHashMap<>();
            if (attempt > 0) {
                while (parts.hasNext()) { // if the source fails again, its error says more
                    for (Iterator<InternalRow> rows = parts.next().rows; rows.hasNext();) {
                        rows.next();
                    }
                }
                report.put("again", attempt);
            } else {
                send(parts, report);
            }
            return Collections.singleton(JSON.writeValueAsString(report)).iterator();
        }

        private void send(Iterator<Part> parts, Map<String, Object> report) throws IOException {
            JsonNode json = JSON.readTree(spec);
            Target target = Target.parse(spec);
            Columns columns = new Columns(json.get("columns"), target.element);
            try (Block block = new Block(target)) {
                if (numbered) {
                    report.put("places", numbered(parts, columns, block, target));
                } else {
                    report.put("seen", ordered(parts, columns, block, json.get("starts")));
                }
                report.put("times", block.finish());
            } catch (Failure failure) {
                report.put("failure", failure.toMap());
            } catch (IOException error) {
                report.put("failure", new Failure(
                        "TransferError",
                        "a Spark executor could not send its rows: " + error).toMap());
            }
        }

        /** The rows of each partition. */
        private static Map<String, Long> ordered(
                Iterator<Part> parts, Columns columns, Block block, JsonNode starts)
                throws IOException {
            Map<String, Long> seen = new LinkedHashMap<>();
            while (parts.hasNext()) {
                Part part = parts.next();
                boolean known = part.number + 1 < starts.size();
                long first = known ? starts.get(part.number).asLong() : 0, row = first;
                long stop = known ? starts.get(part.number + 1).asLong() : 0;
                while (part.rows.hasNext()) {
                    InternalRow its = part.rows.next();
                    if (row == stop) {
                        throw new Failure(
                                "TransferError",
                                "partition " + part.number + " has more rows than when it was "
                                        + "counted, so its rows change between jobs: df.cache() "
                                        + "or df.checkpoint() it first");
                    }
                    columns.read(its, 0, block.bytes, block.offset());
                    block.add(row++);
                }
                if (row > first) {
                    seen.put(Integer.toString(part.number), row - first);
                }
            }
            return seen;
        }

        /** A number, and a bit for each row from it on, compressed: whether it was sent. */
        private static Map<String, Object> numbered(
                Iterator<Part> parts, Columns columns, Block block, Target target)
                throws IOException {
            BitSet places = new BitSet();
            while (parts.hasNext()) {
                for (Iterator<InternalRow> rows = parts.next().rows; rows.hasNext();) {
                    InternalRow its = rows.next();
                    long row = its.getLong(0);
                    if (row < 0 || row >= target.rows) {
                        throw new Failure(
                                "ShapeError",
                                "row " + row + " is outside of a " + target.rows + " x "
                                        + target.cols + " matrix");
                    }
                    if (places.get(Math.toIntExact(row))) {
                        throw Block.duplicate(row);
                    }
                    places.set((int) row);
                    columns.read(its, 1, block.bytes, block.offset());
                    block.add(row);
                }
            }
            int first = Math.max(0, places.nextSetBit(0)) & ~7; // whole bytes
            Map<String, Object> found = new LinkedHashMap<>();
            found.put("first", first);
            found.put("bits", deflated(places.get(first, places.length()).toByteArray()));
            return found;
        }

        /** Compressed: Spark limits the size of a job's results. */
        private static byte[] deflated(byte[] bits) throws IOException {
            ByteArrayOutputStream found = new ByteArrayOutputStream();
            Deflater fast = new Deflater(Deflater.BEST_SPEED);
            try (DeflaterOutputStream stream = new DeflaterOutputStream(found, fast)) {
                stream.write(bits);
            } finally {
                fast.end();
            }
            return found.toByteArray();
        }
    }
}
