package alchemist.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.Serializable;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.BitSet;
import java.util.Collections;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.WeakHashMap;
import java.util.function.Supplier;
import java.util.zip.DeflaterOutputStream;
import org.apache.spark.TaskContext;
import org.apache.spark.api.java.JavaRDD;
import org.apache.spark.mllib.linalg.Matrix;
import org.apache.spark.mllib.linalg.distributed.IndexedRow;
import org.apache.spark.rdd.RDD;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.columnar.CachedBatch;
import org.apache.spark.sql.execution.columnar.DefaultCachedBatch;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.storage.StorageLevel;
import scala.Some;
import scala.Tuple2;

/**
 * Counts rows, and sends rows and blocks to the ranks from executors. The session calls it through
 * py4j.
 *
 * <p>A task returns its report, or its failure, as JSON: if it failed, Spark would repeat it, and
 * rows would be written twice. Errors of the data's own computation fail the task as usual.
 */
public final class Sender {
    private static final Map<RDD<?>, String> COUNTS =
            Collections.synchronizedMap(new WeakHashMap<>());

    private Sender() {}

    /**
     * Rows, or batches of them, of one partition. An error of their source must not be taken for one
     * of sending.
     */
    private static final class Part implements Iterator<Object> {
        final int number;
        private final Iterator<?> source;

        Part(int number, Iterator<?> source) {
            this.number = number;
            this.source = source;
        }

        @Override
        public boolean hasNext() {
            return read(source::hasNext);
        }

        @Override
        public Object next() {
            return read(source::next);
        }

        private static <T> T read(Supplier<T> step) {
            try {
                return step.get();
            } catch (Exception error) { // Scala does not declare its exceptions
                if ((Exception) error instanceof IOException) {
                    throw new UncheckedIOException(
                            "Spark could not read the rows: their source, for example a Python "
                                    + "worker, has ended",
                            (IOException) (Exception) error);
                }
                throw error;
            }
        }
    }

    /**
     * The frame without adaptive execution, which joins partitions from job to job as it likes: rows
     * are counted by partitions in one job, and sent in another.
     */
    public static Dataset<Row> fixed(Dataset<Row> frame) {
        SparkSession session = frame.sparkSession().cloneSession();
        session.conf().set("spark.sql.adaptive.enabled", "false");
        return Dataset.ofRows(session, frame.queryExecution().analyzed());
    }

    /** The rows of a DataFrame in Spark's internal form. */
    public static JavaRDD<InternalRow> rows(Dataset<Row> frame) {
        return frame.queryExecution().toRdd().toJavaRDD();
    }

    /** Batches of Spark's cache, or null: {@link Batches#stored}. */
    public static Batches stored(Dataset<Row> frame) {
        return Batches.stored(frame);
    }

    /** Batches, or null: {@link Batches#of}. */
    public static Batches batches(Dataset<Row> frame) {
        return Batches.of(frame);
    }

    /** One task per core, each with whole partitions: a task has its own connections. */
    private static <T, U> List<U> collect(
            JavaRDD<T> source, int cores, PartitionTasks.Task<Part, U> task) {
        RDD<Part> parts = new PartitionTasks<T, Part>(
                source.rdd(), Object.class,
                (number, some) -> Collections.singleton(new Part(number, some)).iterator());
        RDD<Part> coalesced = parts.coalesce(cores, false, new Some<>(new ByExecutor()), null);
        return new PartitionTasks<>(coalesced, Object.class, task).all();
    }

    /** The rows of an element of an RDD: a row, or a batch of them. */
    private static int rowsOf(Object element) {
        return element instanceof CachedBatch ? ((CachedBatch) element).numRows()
                : element instanceof ColumnarBatch ? ((ColumnarBatch) element).numRows() : 1;
    }

    /**
     * The rows of each partition by its number, as JSON, for partitions that have any. They are
     * remembered for an RDD that Spark keeps: {@link #forget}.
     */
    public static String count(JavaRDD<?> rows, int cores) throws IOException {
        boolean kept = rows.getStorageLevel() != StorageLevel.NONE();
        String known = kept ? COUNTS.get(rows.rdd()) : null;
        if (known != null) {
            return known;
        }
        String found = Target.JSON.writeValueAsString(collect(rows, cores, (task, parts) -> {
            List<long[]> pairs = new ArrayList<>();
            while (parts.hasNext()) {
                Part part = parts.next();
                long count = 0;
                while (part.hasNext()) {
                    count += rowsOf(part.next());
                }
                if (count > 0) {
                    pairs.add(new long[] {part.number, count});
                }
            }
            return pairs.iterator();
        }));
        if (kept) {
            COUNTS.put(rows.rdd(), found);
        }
        return found;
    }

    /** The same of a frame, whose columns are not computed for it. */
    public static String count(Dataset<Row> fixed, int cores) throws IOException {
        return count(rows(fixed.select()), cores);
    }

    /** The rows are others than when they were counted. */
    public static void forget(JavaRDD<?> rows) {
        COUNTS.remove(rows.rdd());
    }

    /**
     * Send rows, or batches of them, ordered by partition: p begins at row {@code starts[p]}; the
     * tasks' reports, as JSON.
     */
    public static String ordered(JavaRDD<?> rows, int cores, String spec) {
        return reports(rows, cores, spec, Sender::ordered);
    }

    /** Send IndexedRows, whose numbers must be below 2^31. */
    public static String numbered(JavaRDD<?> rows, int cores, String spec) {
        return reports(rows, cores, spec, Sender::numbered);
    }

    /** Send the blocks of a BlockMatrix. */
    public static String blocks(JavaRDD<?> blocks, int cores, String spec) {
        return reports(blocks, cores, spec, Sender::blocks);
    }

    /** Sends the elements of a task, and reports what they were. */
    private interface Form extends Serializable {
        void send(Iterator<Part> parts, JsonNode spec, Block block, Map<String, Object> report)
                throws IOException;
    }

    private static String reports(JavaRDD<?> rows, int cores, String spec, Form form) {
        List<String> found = collect(rows, cores, (number, parts) ->
                Collections.singleton(report(parts, spec, form)).iterator());
        return "[" + String.join(",", found) + "]"; // py4j asks for each item of a list
    }

    private static String report(Iterator<Part> parts, String spec, Form form) throws IOException {
        TaskContext context = TaskContext.get();
        int attempt = Math.max(context.attemptNumber(), context.stageAttemptNumber());
        Map<String, Object> report = new LinkedHashMap<>();
        if (attempt > 0) { // if the source fails again, its error says more
            parts.forEachRemaining(part -> part.forEachRemaining(row -> {}));
            report.put("again", attempt);
            return Target.JSON.writeValueAsString(report);
        }
        JsonNode json = Target.JSON.readTree(spec);
        try (Block block = new Block(new Target(json))) {
            form.send(parts, json, block, report);
            report.put("times", block.finish());
        } catch (Failure failure) {
            report.put("failure", failure.toMap());
        } catch (IOException error) {
            report.put("failure", new Failure(
                    "TransferError", "a Spark executor could not send its rows: " + error).toMap());
        }
        return Target.JSON.writeValueAsString(report);
    }

    /** Reports the rows of each partition. */
    private static void ordered(
            Iterator<Part> parts, JsonNode spec, Block block, Map<String, Object> report)
            throws IOException {
        Columns columns = new Columns(spec.get("columns"), block.target.element);
        Stored stored = new Stored(columns, block);
        JsonNode starts = spec.get("starts");
        Map<String, Long> seen = new LinkedHashMap<>();
        while (parts.hasNext()) {
            Part part = parts.next();
            long first = starts.path(part.number).asLong(), row = first;
            long stop = starts.path(part.number + 1).asLong(); // 0: it had no rows
            while (part.hasNext()) {
                Object its = part.next();
                int count = rowsOf(its);
                if (row + count > stop) {
                    throw new Failure(
                            "TransferError",
                            "partition " + part.number + " has more rows than when it was "
                                    + "counted, so its rows change between jobs: df.cache() "
                                    + "or df.checkpoint() it first");
                }
                if (its instanceof DefaultCachedBatch) {
                    stored.send((DefaultCachedBatch) its, row);
                } else if (its instanceof ColumnarBatch) {
                    send((ColumnarBatch) its, row, columns, block);
                } else {
                    columns.read(its, block.bytes, block.offset());
                    block.add(row);
                }
                row += count;
            }
            if (row > first) {
                seen.put(Integer.toString(part.number), row - first);
            }
        }
        report.put("seen", seen);
        report.put("direct", stored.direct());
    }

    /** Send a batch by columns, in parts that fit a block. */
    private static void send(ColumnarBatch batch, long row, Columns columns, Block block)
            throws IOException {
        for (int start = 0, count; start < batch.numRows(); start += count) {
            count = Math.min(block.capacity(), batch.numRows() - start);
            columns.read(batch, start, count, block.bytes);
            block.put(
                    new long[] {row + start, row + start + count, 0, columns.width()},
                    block.bytes);
        }
    }

    /** Reports a number, and a bit for each row from it on: whether it was sent. */
    private static void numbered(
            Iterator<Part> parts, JsonNode spec, Block block, Map<String, Object> report)
            throws IOException {
        Target target = block.target;
        Columns columns = new Columns(spec.get("columns"), target.element);
        BitSet places = new BitSet();
        while (parts.hasNext()) {
            for (Part part = parts.next(); part.hasNext();) {
                IndexedRow its = (IndexedRow) part.next();
                long row = its.index();
                if (row < 0 || row >= target.rows) {
                    throw new Failure(
                            "ShapeError",
                            "row " + row + " is outside of a " + target.rows + " x "
                                    + target.cols + " matrix");
                }
                if (places.get(Math.toIntExact(row))) {
                    throw Block.duplicate("row " + row);
                }
                places.set((int) row);
                columns.read(its, block.bytes, block.offset());
                block.add(row);
            }
        }
        int first = Math.max(0, places.nextSetBit(0)) & ~7; // whole bytes
        ByteArrayOutputStream bits = new ByteArrayOutputStream();
        // Compressed, because Spark limits the size of a job's results.
        try (DeflaterOutputStream stream = new DeflaterOutputStream(bits)) {
            stream.write(places.get(first, places.length()).toByteArray());
        }
        report.put("first", first);
        report.put("bits", bits.toByteArray());
    }

    /** Reports the rows and columns of the blocks in the matrix of blocks. */
    private static void blocks(
            Iterator<Part> parts, JsonNode spec, Block block, Map<String, Object> report)
            throws IOException {
        Target target = block.target;
        long down = spec.get("block").get(0).asLong(), across = spec.get("block").get(1).asLong();
        Set<List<Integer>> places = new LinkedHashSet<>();
        while (parts.hasNext()) {
            for (Part part = parts.next(); part.hasNext();) {
                Tuple2<?, ?> its = (Tuple2<?, ?>) part.next();
                Tuple2<?, ?> place = (Tuple2<?, ?>) its._1();
                int i = (Integer) place._1(), j = (Integer) place._2();
                Matrix matrix = (Matrix) its._2();
                String name = "block (" + i + ", " + j + ")";
                if (!places.add(Arrays.asList(i, j))) {
                    throw Block.duplicate(name);
                }
                long height = Math.min(down, target.rows - i * down);
                long width = Math.min(across, target.cols - j * across);
                if (matrix.numRows() != height || matrix.numCols() != width) {
                    throw new Failure(
                            "ShapeError",
                            name + " has shape (" + matrix.numRows() + ", " + matrix.numCols()
                                    + "); in a " + target.rows + " x " + target.cols
                                    + " matrix of " + down + " x " + across
                                    + " blocks it must have (" + height + ", " + width + ")");
                }
                double[] values = matrix.toArray(); // by columns
                byte[] stored = new byte[Math.multiplyExact(
                        values.length, target.element.nbytes)];
                target.element.store(stored, 0, values, name);
                long row = i * down, col = j * across;
                block.put(new long[] {row, row + height, col, col + width}, stored);
            }
        }
        report.put("blocks", places);
    }
}
